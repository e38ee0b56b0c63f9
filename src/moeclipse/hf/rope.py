"""Rotary position in a `config.json`, of either generation of transformers, in keys of ours, and back.

rope_parameters = {rope_theta, rope_type, factor, ..., partial_rotary_factor}      since 5.0
rope_theta, rope_scaling = {type or rope_type, factor, ...}, partial_rotary_factor  before
rope_parameters = {full_attention: {...}, sliding_attention: {...}}                families that turn
                                                                                   layers with a window
                                                                                   by angles of their own
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from moeclipse.model.config import yarn_magnitude

FULL, SLIDING = "full_attention", "sliding_attention"
KINDS = {"default": "none", "linear": "linear", "dynamic": "dynamic", "yarn": "yarn", "llama3": "llama3"}


def read_rope(
    told: Mapping[str, Any], theta: float, *, of_windows: bool = False
) -> tuple[dict[str, Any], list[str]]:
    """(keys of ours, what we do not have). `theta` is the base where a file names none.

    `of_windows`: layers with a window have angles of their own.
    """
    given = dict(told.get("rope_parameters") or told.get("rope_scaling") or {})
    kind = given.get("rope_type") or given.get("type") or "default"
    if of_windows and set(given) == {FULL, SLIDING}:
        return read_both(told, given, theta)
    if any(isinstance(value, Mapping) for value in given.values()):
        return {}, ["rotary position that differs from layer to layer"]
    if kind not in KINDS:
        return {}, [f"rotary scaling of type {kind!r}"]
    values: dict[str, Any] = {
        "model.rope_base": float(given.get("rope_theta") or told.get("rope_theta") or theta),
        "model.rope_scaling": KINDS[kind],
    }
    latent = "qk_rope_head_dim" in told
    share = given.get("partial_rotary_factor") or told.get("partial_rotary_factor") or 1.0
    if not latent and share != 1:
        head = told.get("head_dim") or told["hidden_size"] // told["num_attention_heads"]
        values["model.rope_dim"] = int(head * share)
    if kind == "default":
        return values, []
    longest = told.get("max_position_embeddings") or 0
    original = given.get("original_max_position_embeddings") or longest
    factor = given.get("factor") or (longest / original if original else 0)
    if not factor or not original:
        return {}, ["rotary scaling without a factor or an original length"]
    values["model.rope_factor"] = float(factor)
    values["model.rope_original_len"] = int(longest if kind == "dynamic" else original)
    if kind == "llama3":
        values["model.rope_low_freq"] = float(given["low_freq_factor"])
        values["model.rope_high_freq"] = float(given["high_freq_factor"])
    if kind == "yarn":
        values |= read_yarn(given, float(factor))
    if latent and given.get("mscale_all_dim"):
        qk = told["qk_nope_head_dim"] + told["qk_rope_head_dim"]
        values["model.attention_scale"] = qk**-0.5 * yarn_magnitude(factor, given["mscale_all_dim"]) ** 2
    return values, []


def read_both(
    told: Mapping[str, Any], given: Mapping[str, Any], theta: float
) -> tuple[dict[str, Any], list[str]]:
    """Layers with a window turn without scaling."""
    values, needs = read_rope({**told, "rope_parameters": given[FULL]}, theta)
    near, near_needs = read_rope({**told, "rope_parameters": given[SLIDING]}, theta)
    if near and near["model.rope_scaling"] != "none":
        near_needs = [f"rotary scaling in layers with a window ({near['model.rope_scaling']})"]
    if needs or near_needs:
        return {}, [*needs, *near_needs]
    if given[FULL] == given[SLIDING] or SLIDING not in (told.get("layer_types") or ()):
        return values, []
    width = near.get("model.rope_dim", 0)
    return values | {"model.window_rope_base": near["model.rope_base"], "model.window_rope_dim": width}, []


def read_yarn(given: Mapping[str, Any], factor: float) -> dict[str, Any]:
    magnitude = given.get("attention_factor")
    if magnitude is None and given.get("mscale") and given.get("mscale_all_dim"):
        one, all_dim = (yarn_magnitude(factor, given[key]) for key in ("mscale", "mscale_all_dim"))
        magnitude = one / all_dim
    return {
        "model.rope_beta_fast": float(given.get("beta_fast") or 32),
        "model.rope_beta_slow": float(given.get("beta_slow") or 1),
        "model.rope_truncate": bool(given.get("truncate", True)),
        "model.rope_magnitude": float(magnitude or 0),
    }


def write_rope(values: Mapping[str, Any], context: int) -> dict[str, Any]:
    """Their keys for ours, as both generations read them; `context`: tokens of the longest text."""
    v = {key.removeprefix("model."): value for key, value in values.items()}
    kind = next(theirs for theirs, ours in KINDS.items() if ours == v["rope_scaling"])
    told: dict[str, Any] = {"rope_type": kind, "rope_theta": v["rope_base"]}
    latent = v["attention"] == "mla"
    share = 1.0 if latent else (v["rope_dim"] or v["head_dim"]) / v["head_dim"]
    if not latent:  # whose turning part has a width of its own
        told["partial_rotary_factor"] = share
    longest = context
    if kind != "default":
        told["factor"] = v["rope_factor"]
        longest = max(context, int(v["rope_original_len"] * v["rope_factor"]))
    if kind == "dynamic":
        longest = v["rope_original_len"]
    elif kind in ("yarn", "llama3"):
        told["original_max_position_embeddings"] = v["rope_original_len"]
    if kind == "llama3":
        told |= {"low_freq_factor": v["rope_low_freq"], "high_freq_factor": v["rope_high_freq"]}
    if kind == "yarn":
        told |= write_yarn(v, latent)
    if v["growth"] and v["growth_in"] == "all":
        told["llama_4_scaling_beta"] = v["growth"]
    beside = {"partial_rotary_factor": share} if share != 1 else {}
    return {
        "rope_parameters": told,
        "rope_theta": v["rope_base"],
        "max_position_embeddings": longest,
    } | beside


def write_both(values: Mapping[str, Any], context: int) -> dict[str, Any]:
    """For families that say it of layers with and without a window."""
    told = write_rope(values, context)
    near = dict(values)
    if values["model.window_rope_base"]:
        near |= {
            "model.rope_base": values["model.window_rope_base"],
            "model.rope_dim": values["model.window_rope_dim"],
            "model.rope_scaling": "none",
        }
    both = {FULL: told["rope_parameters"], SLIDING: write_rope(near, context)["rope_parameters"]}
    return {"rope_parameters": both, "max_position_embeddings": told["max_position_embeddings"]}


def write_yarn(v: Mapping[str, Any], latent: bool) -> dict[str, Any]:
    factor = v["rope_factor"]
    told = {
        "beta_fast": v["rope_beta_fast"],
        "beta_slow": v["rope_beta_slow"],
        "truncate": v["rope_truncate"],
        "attention_factor": v["rope_magnitude"] or yarn_magnitude(factor),
    }
    if latent and v["attention_scale"] and factor > 1:
        # Their factor on query . key is 1 / sqrt(width), times the square of a magnitude of yarn's.
        stretch = math.sqrt(v["attention_scale"] * math.sqrt(v["qk_nope_head_dim"] + v["qk_rope_head_dim"]))
        if not math.isclose(stretch, 1, rel_tol=1e-12):
            told["mscale_all_dim"] = (stretch - 1) / (0.1 * math.log(factor))
    return told
