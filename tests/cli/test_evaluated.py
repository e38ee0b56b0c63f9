"""What a terminal says of text that is held out."""

from __future__ import annotations

from moeclipse.cli.evaluated import eval_lines, eval_text

TOLD = {"eval_loss": 1.5, "eval_perplexity": 4.4817, "eval_targets": 9}


def test_one_source_and_several() -> None:
    assert eval_text(TOLD) == "held out: loss 1.5000, perplexity 4.482"
    parts = {"web": {"eval_perplexity": 3.0}, "code": {"eval_perplexity": 12345.0}}
    assert eval_text({**TOLD, "eval_sources": parts}).endswith("4.482 (web 3, code 1.234e+04)")


def test_a_summary_says_which_step_was_the_best() -> None:
    assert eval_lines({}) == []
    ((label, lines),) = eval_lines(TOLD)
    assert (label, [line.plain for line in lines]) == ("eval", ["held out: loss 1.5000, perplexity 4.482"])
    ((_, lines),) = eval_lines({**TOLD, "best_eval_loss": 1.25, "best_step": 40})
    assert lines[1].plain == "best: loss 1.2500 after step 40, which is kept"
