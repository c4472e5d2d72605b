"""analyze() against loops from the definitions, on edge cases, for every normalizer; and the rules of the verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import naive
import naive_rows
import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from attnlimits.analysis import Analysis, Settings, analyze, claims, rows
from attnlimits.attention import attach
from attnlimits.normalizers import REGISTRY

LENGTH, T = 12, 0.7
SETTINGS = Settings(
    lengths=(4, 8),
    length_n=2,
    top_n=(1, 3),
    critical_n=(1, 2, 4),
    separability_n=(1, 2, 4),
    temperatures=(0.05, 0.07, 0.1, 1.0),
    steps=(1e-3, 10.0),
    verdict_n=2,
)
TOKENS = torch.randint(50, (2, LENGTH), generator=torch.Generator().manual_seed(1))
PROVABLE = ("theorem_1_fixed", "corollary_1", "theorem_2_sure", "corollary_3", "sensitivity")


def gpt2(**options: object) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32, "vocab_size": 50, "initializer_range": 0.4}
    return GPT2LMHeadModel(GPT2Config(**shape, **options)).double().eval()


def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    return LlamaForCausalLM(LlamaConfig(**shape, intermediate_size=32, vocab_size=50)).double().eval()


# --------------------------------------------------------------------------------------- against the definitions


def by_definition(model: PreTrainedModel, ids: Tensor, passage: int) -> Iterator[tuple[tuple, list[float]]]:
    """((experiment, layer, head, L, N, T, eps, quantity), its values at the rows that count)."""
    qkv: list[Tensor] = []
    hooks = [b.attn.c_attn.register_forward_hook(lambda m, i, out: qkv.append(out[0])) for b in model.transformer.h]
    with torch.no_grad():
        model(ids[None])
    for hook in hooks:
        hook.remove()
    for layer, packed in enumerate(qkv):
        q, k, v = (part.view(LENGTH, 2, 8).transpose(0, 1) for part in packed.split(16, dim=-1))
        for head in range(2):
            yield from head_by_definition(q[head], k[head], v[head], (SETTINGS.seed, passage, layer), (layer, head))


def head_by_definition(q: Tensor, k: Tensor, x: Tensor, seed: tuple, at: tuple) -> Iterator[tuple[tuple, list[float]]]:
    nan = math.nan
    logits = [(k[: t + 1] @ q[t]) * 8**-0.5 for t in range(LENGTH)]
    weights = [torch.softmax(z / T, -1).tolist() for z in logits]
    for experiment, sizes, lengths in (
        ("distance_vs_length", [2], [4, 8, 12]),
        ("distance_vs_topn", [1, 3], [12]),
        ("critical_topn", [1, 2, 4], [4, 8, 12]),
    ):
        for N in sizes:
            found = {t: naive_rows.distances(weights[t], x[: t + 1], N) for t in range(N, LENGTH)}
            for L in [L for L in lengths if N < L]:
                for name in found[LENGTH - 1] if experiment != "critical_topn" else COMPARED:
                    yield (experiment, *at, L, N, nan, nan, name), [found[t][name] for t in found if t < L]
    for N in (1, 2, 4):
        found = {t: naive_rows.separabilities(weights[t], x[: t + 1], N) for t in range(N, LENGTH)}
        for name in found[LENGTH - 1]:
            yield ("separability", *at, LENGTH, N, nan, nan, name), [values[name] for values in found.values()]
    cosines = [naive.anisotropy(x, range(t + 1)) for t in range(1, LENGTH)]
    yield ("separability", *at, LENGTH, nan, nan, nan, "anisotropy"), cosines
    yield ("separability", *at, LENGTH, nan, nan, nan, "first_key_mass"), [a[0] for a in weights]
    for temperature in SETTINGS.temperatures:
        for eps in SETTINGS.steps:
            values = [naive_rows.sensitivity(z, temperature, eps, (*seed, t)) for t, z in enumerate(logits)]
            yield ("gradient_sensitivity", *at, LENGTH, nan, temperature, eps, "sensitivity"), values
    norms = [naive_rows.jacobian_norm(a, T) for a in weights]
    yield ("gradient_sensitivity", *at, LENGTH, nan, nan, nan, "jacobian_norm"), norms
    for L in (4, 8, 12):
        rows_here = range(L // 2, L)
        found = {
            t: naive_rows.shares(weights[t]) | naive_rows.weight_bounds(q[t], k[: t + 1], 8**-0.5, T) for t in rows_here
        }
        for name in found[L - 1]:
            yield ("vanishing", *at, L, nan, nan, nan, name), [found[t][name] for t in rows_here]


COMPARED = ("distance", "expected_distance_lower", "expected_distance_upper", "expected_distance_no_factor")
INDEX = ["experiment", "layer", "head", "L", "N", "T", "eps", "quantity"]


def keyed(table: pd.DataFrame, columns: list[str]) -> dict[tuple, tuple]:
    plain = table[INDEX].astype({"N": float})
    keys = [tuple(None if isinstance(v, float) and math.isnan(v) else v for v in row) for row in plain.to_numpy(object)]
    return dict(zip(keys, table[columns].itertuples(index=False, name=None), strict=True))


def test_every_number_of_every_table_is_its_definition() -> None:
    model = attach(gpt2(), {"name": "softmax"}, T=T, context_length=LENGTH)
    table = analyze(model, TOKENS, SETTINGS).results
    for passage in (0, 1):
        found = keyed(table[table["passage"] == passage], ["value", "rows"])
        seen = set()
        for raw, values in by_definition(model, TOKENS[passage], passage):
            key = tuple(None if isinstance(v, float) and math.isnan(v) else v for v in raw)
            value, n_rows = found[key]
            # Distances are differences of squares: what is 0 comes out as 1e-8 of the terms.
            assert value == pytest.approx(np.mean(values), rel=1e-6, abs=1e-7), key
            assert n_rows == len(values), key
            seen.add(key)
        assert seen == set(found)


def test_rows_left_out_are_counted() -> None:
    table = analyze(gpt2(), TOKENS, SETTINGS).results
    part = table[(table["experiment"] == "critical_topn") & (table["quantity"] == "distance")]
    # Row t sees t + 1 keys; those that see no more than N are left out.
    assert (part["rows_left_out"] == part["N"]).all()
    assert (part["rows"] == part["L"] - part["N"]).all()
    assert set(part.loc[part["L"] == 4, "N"]) == {1, 2}  # N = L has no outsider: nothing to report


def test_weights_are_those_of_plain_hugging_face() -> None:
    model = gpt2().float()
    plain = GPT2LMHeadModel.from_pretrained(None, config=model.config, state_dict=model.state_dict())
    plain.set_attn_implementation("eager")
    attentions = plain.eval()(TOKENS, output_attentions=True).attentions
    heads = analyze(model, TOKENS, SETTINGS).heads
    for layer, weights in enumerate(attentions):
        largest = weights.amax(-1).mean(dim=(0, 2)).tolist()
        assert heads.loc[heads["layer"] == layer, "max_weight"].tolist() == pytest.approx(largest, abs=1e-5)


# ---------------------------------------------------------------------------------------------- what must not matter


def values_of(analysis: Analysis) -> np.ndarray:
    return analysis.results["value"].to_numpy()


def test_results_depend_on_neither_chunks_threads_nor_company(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = analyze(gpt2(), TOKENS, SETTINGS)
    first = whole.results[whole.results["passage"] == 0]["value"].to_numpy()
    np.testing.assert_allclose(values_of(analyze(gpt2(), TOKENS[:1], SETTINGS)), first, rtol=1e-9, atol=1e-12)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        np.testing.assert_allclose(values_of(analyze(gpt2(), TOKENS, SETTINGS)), values_of(whole), rtol=1e-6, atol=1e-9)
    finally:
        torch.set_num_threads(threads)
    monkeypatch.setattr(rows, "BLOCK", 5)
    monkeypatch.setattr(rows, "SENSITIVITY_BLOCK", 3)
    np.testing.assert_allclose(values_of(analyze(gpt2(), TOKENS, SETTINGS)), values_of(whole), rtol=1e-6, atol=1e-9)


def test_shorter_lengths_are_passages_of_their_own() -> None:
    """A causal row does not depend on what follows it."""
    whole, short = analyze(gpt2(), TOKENS, SETTINGS).results, analyze(gpt2(), TOKENS[:, :8], SETTINGS).results
    for experiment in ("distance_vs_length", "critical_topn", "vanishing"):
        parts = [t[(t["experiment"] == experiment) & (t["L"] <= 8)].reset_index(drop=True) for t in (whole, short)]
        pd.testing.assert_frame_equal(*parts)


def test_raw_logits_are_scaled_ones_with_the_papers_temperature() -> None:
    """Raw logits are sqrt(d) times as large: g(T sqrt d, eps sqrt d) = g(T, eps)/sqrt d."""
    root = math.sqrt(8)
    options = {"experiments": ("gradient_sensitivity",)}
    scaled = analyze(gpt2(), TOKENS, Settings(**options, temperatures=(0.5,), steps=(0.1,)))
    raw = analyze(gpt2(), TOKENS, Settings(**options, temperatures=(0.5 * root,), steps=(0.1 * root,), logits="raw"))
    parts = [a.results[a.results["quantity"] == "sensitivity"]["value"].to_numpy() for a in (scaled, raw)]
    np.testing.assert_allclose(parts[1] * root, parts[0], rtol=1e-9)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_plain_model_comes_back_as_it_was(make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    before, modules = model(TOKENS).logits, {name for name, _ in model.named_modules()}
    found = analyze(model, TOKENS, SETTINGS)
    assert found.normalizer == "softmax"
    assert len(found.heads) == model.config.num_hidden_layers * model.config.num_attention_heads
    assert torch.equal(model(TOKENS).logits, before)
    assert {name for name, _ in model.named_modules()} == modules
    assert model.config._attn_implementation == "sdpa"
    assert not hasattr(model.config, "attnlimits")


def test_representation_is_what_it_says() -> None:
    model = gpt2()
    embedding = analyze(model, TOKENS, Settings(experiments=("separability",), representation="embedding")).heads
    tokens = model.transformer.wte(TOKENS).detach()
    expected = np.mean([np.mean([naive.anisotropy(x, range(t + 1)) for t in range(1, LENGTH)]) for x in tokens])
    # Equal tokens have cosine 1 here and a shade less there.
    assert embedding["anisotropy"].to_numpy() == pytest.approx(np.full(4, expected), abs=1e-6)
    hidden = analyze(model, TOKENS, Settings(experiments=("separability",), representation="hidden")).heads
    first = model.transformer.h[0].ln_1(tokens + model.transformer.wpe(torch.arange(LENGTH)))
    expected = np.mean([np.mean([naive.anisotropy(x, range(t + 1)) for t in range(1, LENGTH)]) for x in first.detach()])
    assert hidden["anisotropy"].to_numpy()[:2] == pytest.approx(np.full(2, expected), abs=1e-6)


# ----------------------------------------------------------------------------------------------------- edge cases


def scale_queries(model: PreTrainedModel, factor: float) -> None:
    for block in model.transformer.h:
        block.attn.c_attn.weight.data[:, :16] *= factor
        block.attn.c_attn.bias.data[:16] *= factor


def zero_values(model: PreTrainedModel) -> None:
    for block in model.transformer.h:
        block.attn.c_attn.weight.data[:, 32:] = 0
        block.attn.c_attn.bias.data[32:] = 0


def no_positions(model: PreTrainedModel) -> None:
    model.transformer.wpe.weight.data.zero_()


EDGES: dict[str, tuple[Callable[[PreTrainedModel], None], Tensor]] = {
    "rows of equal weights": (lambda model: scale_queries(model, 0.0), TOKENS),
    "one-hot rows": (lambda model: scale_queries(model, 1e4), TOKENS),
    "zero vectors": (zero_values, TOKENS),
    "one token repeated, all representations alike": (no_positions, torch.full((2, LENGTH), 7)),
    "tokens repeated": (no_positions, TOKENS % 3),
    "four tokens": (lambda model: None, TOKENS[:, :4]),
}


@pytest.mark.parametrize("edge", EDGES)
def test_edge_cases_are_defined_and_refute_nothing_that_is_proved(edge: str) -> None:
    spoil, tokens = EDGES[edge]
    model = gpt2()
    spoil(model)
    found = analyze(model, tokens, SETTINGS)
    counted = found.results[(found.results["rows"] > 0)]
    assert np.isfinite(counted["value"]).all() or edge == "one-hot rows"  # whose bounds overflow
    provable = found.audit[(found.audit["version"] == "provable") & found.audit["statement"].isin(PROVABLE)]
    assert len(provable) > 5
    assert (provable["rows_violated"].fillna(0) == 0).all(), provable[provable["rows_violated"] > 0]


def test_equal_weights_violate_corollary_3_as_published_nowhere_but_on_two_keys() -> None:
    """||J|| = 1/n for equal weights at T = 1: above 1/4 for n = 2 and 3 only."""
    model = gpt2()
    scale_queries(model, 0.0)
    audit = analyze(model, TOKENS, SETTINGS).audit.set_index(["statement", "version"])
    assert audit.loc[("corollary_3", "published"), "rows_violated"] == 2 / LENGTH
    assert audit.loc[("corollary_3", "provable"), "rows_violated"] == 0


def test_ties_in_the_top_set_go_to_the_earlier_key() -> None:
    """Equal weights: I_N are the first N keys, and their sum is known."""
    model = gpt2()
    scale_queries(model, 0.0)
    table = analyze(model, TOKENS[:1], Settings(experiments=("distance_vs_topn",), top_n=(3,))).results
    packed: list[Tensor] = []
    hook = model.transformer.h[0].attn.c_attn.register_forward_hook(lambda m, i, out: packed.append(out[0]))
    model(TOKENS[:1])
    hook.remove()
    x = packed[0][:, 32:40]  # values of head 0
    expected = np.mean([(x[:3].sum(0) / n).norm().item() for n in range(4, LENGTH + 1)])
    first = table[(table["quantity"] == "selected_norm") & (table["layer"] == 0) & (table["head"] == 0)]
    assert first["value"].item() == pytest.approx(expected)


def test_nan_in_a_weight_is_refused_by_name() -> None:
    model = gpt2()
    model.transformer.h[1].attn.c_proj.weight.data[3, 2] = math.nan
    with pytest.raises(ValueError, match=r"transformer\.h\.1\.attn\.c_proj\.weight"):
        analyze(model, TOKENS, SETTINGS)


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="3 tokens"):
        analyze(gpt2(), TOKENS[:, :3], SETTINGS)


@pytest.mark.parametrize(
    "options",
    [{"experiments": ("distance",)}, {"top_n": (0,)}, {"temperatures": (0.0,)}, {"steps": ()}, {"ks_level": 1.0}],
    ids=str,
)
def test_settings_that_make_no_sense_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match="must be"):
        Settings(**options)


# ------------------------------------------------------------------------------------------- normalizers and verdicts


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_bounds_that_do_not_apply_are_refused_and_the_others_hold(name: str) -> None:
    found = analyze(attach(gpt2(), {"name": name}, T=T, context_length=LENGTH), TOKENS, SETTINGS)
    provable = found.audit[(found.audit["version"] == "provable") & found.audit["statement"].isin(PROVABLE)]
    assert (provable["rows_violated"].fillna(0) == 0).all(), provable[provable["rows_violated"] > 0]
    softmaxes = {"softmax", "ssmax", "log_length"}
    for statement in ("corollary_1", "corollary_3", "sensitivity"):
        assert (statement in set(found.audit["statement"])) == (name in softmaxes)
    refused = found.claims[found.claims["verdict"] == "not applicable"]
    assert set(refused["section"]) >= (set() if name in softmaxes else {"Corollary 1", "Corollary 3"})
    assert refused["shown"].str.len().gt(15).all()  # a reason


def test_bound_verdicts() -> None:
    base = {"rows_violated": 0.0, "heads_violated": 0.0, "rows_vacuous": 0.0, "ratio": 2.0}
    cases = [({}, None, "holds"), ({"rows_violated": 1e-6, "rows_vacuous": 1.0}, None, "violated")]
    cases += [({"rows_vacuous": 0.9}, None, "vacuous"), ({"ratio": 10.0}, None, "holds, loose")]
    cases += [({"ratio": 0.1}, "lower", "holds, loose"), ({"ratio": 0.2}, "lower", "holds")]
    for changes, side, word in cases:
        assert claims.bound_verdict(base | changes, side) == word


def test_exponent_is_that_of_a_power_law() -> None:
    L = np.array([32.0, 64.0, 128.0])
    assert claims.exponent(pd.Series(3 * L**0.7, index=L)) == pytest.approx(0.7)
    assert math.isnan(claims.exponent(pd.Series([1.0, 2.0], index=[1.0, 2.0])))


def judged(experiment: str, curves: dict[str, dict[float, float]], index: str, **at: float) -> dict[str, tuple]:
    """The claims of an experiment on made-up curves: verdict by claim."""
    records = [
        {"experiment": experiment, "L": math.nan, "N": math.nan, "T": math.nan, "eps": math.nan, "quantity": quantity}
        | at
        | {index: place, "value": value}
        for quantity, curve in curves.items()
        for place, value in curve.items()
    ]
    found = claims.claims(
        claims.Evidence(
            curves=pd.DataFrame(records),
            audit=pd.DataFrame(columns=["statement", "version", "side", "rows"]),
            critical=pd.DataFrame(),
            heads=pd.DataFrame(),
            normalizer=REGISTRY["softmax"](T=1.0, n_heads=1, context_length=8),
            settings=Settings(experiments=(experiment,)),
        )
    )
    return dict(zip(found["claim"], found["verdict"], strict=True))


def test_growth_with_length_is_judged_by_its_exponent() -> None:
    L = [32.0, 64.0, 128.0, 256.0]
    curves = {"distance": {n: n**1.1 for n in L}, "expected_distance_lower": dict.fromkeys(L, 3.0)}
    curves |= {"expected_distance_upper": dict.fromkeys(L, 4.0), "expected_distance_no_factor": {n: n for n in L}}
    verdicts = judged("distance_vs_length", curves, "L", N=5)
    assert verdicts["d~ grows about linearly with L"] == "reproduced"
    assert verdicts["E d~ grows about linearly with L"] == "not reproduced"
    curves["distance"] = {n: n**1.3 for n in L}
    assert judged("distance_vs_length", curves, "L", N=5)["d~ grows about linearly with L"] == "not reproduced"


def test_plateaus_are_judged_by_their_ratio() -> None:
    names = ("distance", "expected_distance_lower", "expected_distance_upper", "expected_distance_no_factor")
    curves = {name: {1.0: 1.0, 20.0: 10.0, 100.0: 12.0} for name in names}
    verdicts = judged("distance_vs_topn", curves, "N", L=1024)
    assert verdicts["d~ reaches a plateau beyond N of about 20"] == "reproduced"
    assert verdicts["d~ and E d~ meet toward N = 100"] == "reproduced"
    curves["distance"][100.0] = 13.0
    verdicts = judged("distance_vs_topn", curves, "N", L=1024)
    assert verdicts["d~ reaches a plateau beyond N of about 20"] == "not reproduced"


def test_gradients_are_judged_by_slope_and_orders() -> None:
    steps = min(Settings().steps)
    curves = {"sensitivity": {t: 0.01 / t for t in (0.02, 0.05, 0.1, 1.0)}}
    verdicts = judged("gradient_sensitivity", curves, "T", eps=steps)
    assert verdicts["g grows as 1/T for T below 0.1"] == "reproduced"
    assert verdicts["At T >= 1 g is two orders of magnitude lower"] == "reproduced"
    curves["sensitivity"] = {t: 0.01 / t**0.5 for t in (0.02, 0.05, 0.1, 1.0)}
    verdicts = judged("gradient_sensitivity", curves, "T", eps=steps)
    assert verdicts["g grows as 1/T for T below 0.1"] == "not reproduced"
    assert verdicts["At T >= 1 g is two orders of magnitude lower"] == "not reproduced"


def test_what_was_not_run_is_not_measured() -> None:
    found = analyze(gpt2(), TOKENS, Settings(experiments=("vanishing",), verdict_n=2))
    sections = dict(zip(found.claims["section"], found.claims["verdict"], strict=True))
    assert sections["Experiment 1"] == "not measured"
    assert sections["Vanishing"] != "not measured"
    assert set(found.heads["verdict"]) <= {"healthy", "saturated", "vanishing", "sharp"}
    assert "critical" not in found.tables()


def test_bands_come_from_passages() -> None:
    assert analyze(gpt2(), TOKENS[:1], SETTINGS).curves["low"].isna().all()
    curves = analyze(gpt2(), TOKENS, SETTINGS).curves.dropna(subset=["value"])
    assert (curves["low"] <= curves["value"]).all()
    assert (curves["value"] <= curves["high"]).all()
