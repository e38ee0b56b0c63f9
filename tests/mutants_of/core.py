"""Mutants of core/: settings, their words and errors."""

from __future__ import annotations

from mutants_of.mutant import Mutant

MUTANTS = (
    Mutant(
        "core/program.py",
        "{shlex.join(map(str, words))}",
        "{' '.join(map(str, words))}",
        "core/test_program.py::test_folders_with_spaces_are_quoted",
        "a command with a bare path",
        "pasted, it names another folder",
    ),
    Mutant(
        "core/config.py",
        """\
                values[key], origins[key] = value, given.origin
                unread.discard(key)
""",
        "                values[key], origins[key] = value, given.origin\n",
        "core/test_config.py::test_a_flag_that_covers_a_mistake_is_checked_itself",
        "a key that could not be read in a file stays unread",
        "of two mistakes in one key one is told: the other needs a second start",
        survived=True,
    ),
    Mutant(
        "core/config.py",
        '(?<![\\w.]){re.escape(key)}(?![\\w.]*\\w)"',
        '(?<![\\w.]){re.escape(key)}"',
        "core/test_config.py::test_a_key_is_not_named_by_its_beginning",
        "a key counts as named by its beginning",
        "problems are left out, or laid to a file that did not give the key",
        survived=True,
    ),
    Mutant(
        "core/config.py",
        '        flag, has_value, value = word.partition("=")\n',
        '        flag, has_value, value = word.rpartition("=") if "=" in word else (word, "", "")\n',
        "core/test_config.py::test_a_flag_s_value_may_hold_an_equals_sign",
        "a flag is split at its last `=`",
        "`--run.name=lr=1e-3` is an unknown key",
        survived=True,
    ),
    Mutant(
        "core/config.py",
        """\
            arguments[field.name] = values[field.name]
    return""",
        """\
            arguments[field.name] = values[field.name] or getattr(schema, field.name, None)
    return""",
        "core/test_config.py::test_flags_are_read_as_their_type",
        "0, false and empty lists count as not given",
        "`--data.no-shuffle` shuffles",
    ),
    Mutant(
        "core/config.py",
        "tuple(dict.fromkeys(found)), tuple(notes))",
        "tuple(found[:1]), tuple(notes))",
        "core/test_config.py::test_all_problems_come_together",
        "only the first problem is told",
        "files are mended one start at a time",
    ),
    Mutant(
        "core/values.py",
        "any(value == arg and type(value) is type(arg) for arg in args):",
        "value in args:",
        "core/test_values.py::test_no_value_is_bent_to_fit",
        "a choice compared by value alone",
        "`true` is taken for 1",
        survived=True,
    ),
    Mutant(
        "core/values.py",
        """\
        if not math.isfinite(value):
            raise Mismatch("a finite number")
""",
        "",
        "core/test_values.py::test_no_value_is_bent_to_fit",
        "nan and inf are numbers",
        "`optim.lr = nan` trains to nothing",
    ),
    Mutant(
        "core/toml.py",
        "    for part in reversed(schema.__mro__[:-1]):",
        "    for part in schema.__mro__[:-1]:",
        "core/test_toml.py::test_a_class_describes_what_it_changes_of_its_base",
        "the description of a base class wins",
        "`--print-config` explains a key wrongly",
        survived=True,
    ),
    Mutant(
        "core/toml.py",
        "ord(character) < 32 or ord(character) == 127 else",
        "ord(character) < 32 else",
        "core/test_toml.py::test_characters_that_toml_forbids_in_a_text",
        "DEL written as it is",
        "a run cannot read its own config.toml again",
    ),
    Mutant(
        "core/shares.py",
        "min(part, more)",
        "max(0, part - parts + more)",
        "core/test_shares.py::test_the_first_shares_are_larger",
        "the last shares are larger",
        "checkpoints and ranks disagree about who holds which rows",
    ),
    Mutant(
        "core/host_memory.py",
        "limit - int(",
        "limit or int(",
        "core/test_host_memory.py::test_the_container_may_have_less",
        "what a container uses already is not taken off",
        "a run is killed for memory that was promised",
    ),
    Mutant(
        "core/errors.py",
        "    code = 75  # EX_TEMPFAIL: try again later",
        "    code = 0",
        "core/test_errors.py::test_bad_input_ends_with_2_and_all_else_with_1",
        "a preempted run ends as one that is done",
        "no scheduler starts it again",
    ),
    Mutant(
        "core/errors.py",
        "visible(text, lines=True) if self.lines else sentence(text)",
        "text",
        "core/test_shown.py::test_errors_are_harmless_wherever_they_are_printed",
        "an error's text is what a file says",
        "a model's file colours, moves and overwrites what stands on the terminal",
    ),
    Mutant(
        "core/shown.py",
        "\\ud800-\\udfff]",
        "]",
        "core/test_shown.py::test_what_is_said_can_be_encoded",
        "half a surrogate pair is printed",
        "a folder whose name is not UTF-8 ends a command in a traceback",
    ),
    Mutant(
        "core/config.py",
        "if any(map(HALF.search, values)):",
        "if False:",
        "core/test_config.py::test_what_no_file_can_hold_is_refused",
        "bytes that are no text are taken for a path",
        "the run begins, and ends where its configuration is written",
    ),
    Mutant(
        "core/outside.py",
        "if not any(found.is_relative_to(one) for one in (root, *blobs)):",
        "if not found:",
        "core/test_outside.py::test_no_link_leads_out_of_a_folder",
        "links of a folder lead anywhere",
        "a model from elsewhere has any file of this machine copied",
    ),
    Mutant(
        "core/outside.py",
        "    if len(data) > most:\n",
        "    if not most:\n",
        "core/test_outside.py::test_sizes_are_bounded",
        "a file is taken up to its bound, and the rest passed over",
        "half a configuration counts as one",
    ),
    Mutant(
        "core/outside.py",
        'raise ValueError(f"{_key(way)} is {one}, not a finite number")',
        "continue",
        "core/test_outside.py::test_json_is_bounded_and_the_key_is_named",
        "numbers of JSON may be infinite",
        "a model is made of them, and its losses are NaN",
    ),
)
