"""Requests of training runs: what they compute, accumulate and refuse."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from learner_support import VOCABULARY, relative_difference
from safetensors.torch import load_file
from tables import table
from training_support import (
    OTHER,
    RUN,
    answer,
    ask,
    create,
    data_request,
    done,
    equal,
    gradients,
    make_datum,
    make_runs,
    optim,
    started,
    weights,
)
from transformers import AutoModelForCausalLM

from async_rl.observability.catalogue import describe
from async_rl.protocol.service import Operation
from async_rl.service import losses, proto
from async_rl.service.losses import Row, find_loss
from async_rl.service.training import TrainingRuns

RNG = np.random.default_rng


@pytest.fixture(scope="module")
def shared(model_path: Path) -> TrainingRuns:
    """One process for tests that change no weights."""
    return started(make_runs(model_path))


def plain_logprobs(model: Any, datum: dict[str, np.ndarray]) -> torch.Tensor:
    """By the model's own forward pass, alone: [N] or [N, K]."""
    logits = model(torch.tensor(datum["tokens"])[None]).logits[0].double()
    targets = torch.tensor(datum["target_tokens"])
    chosen = logits.log_softmax(-1).gather(1, targets.reshape(len(targets), -1))
    return chosen.reshape(targets.shape)


@pytest.mark.parametrize(
    ("loss", "alternatives"),
    [("cross_entropy", 0), ("cross_entropy", 5), ("ppo", 0), ("dro", 0), ("gspo", 0)],
)
def test_a_request_is_the_sum_over_its_datums(
    loss: str, alternatives: int, model_path: Path, shared: TrainingRuns
) -> None:
    """At first the adapter is the base model: B is 0, so only B has a gradient, s G A^T."""
    rng = RNG(1)
    data = [make_datum(rng, size, loss, alternatives) for size in (9, 30, 4)]
    given = {"beta": 0.05} if loss == "dro" else {}
    executed = done(shared, "forward_backward", data_request(data, loss, given))
    rows, metrics = answer(executed)
    found = gradients(shared)
    run = shared.tenants[RUN]
    run.forget_gradients()
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    definition, config = find_loss(loss, given)
    total = torch.zeros((), dtype=torch.float64)
    for datum, row in zip(data, rows, strict=True):
        p = plain_logprobs(model, datum)
        np.testing.assert_allclose(row, p.detach().numpy(), atol=2e-5)
        inputs = {name: datum[name] for name in definition.inputs}
        inputs |= {name: np.full(p.shape, value, np.float32) for name, value in config.items()}
        example: Any = SimpleNamespace(tokens=p, inputs=inputs)
        nothing: Any = None
        row_of = Row(examples=[example], packed=nothing, pair=torch.zeros(1))
        total = total + definition.compute(p, row_of).sum()
    total.backward()
    assert metrics == {"loss:sum": pytest.approx(float(total.detach()), rel=1e-5)}
    assert executed.tokens == 43
    dense = {name: p.grad for name, p in model.named_parameters()}
    names = [name for name in found if "lora_B" in name]
    expected = []
    for name in names:
        owner = name.removesuffix(".lora_B.weight").removeprefix("base_model.model.")
        a = run.weights[name.replace("lora_B", "lora_A")].detach()
        expected.append(4.0 * dense[f"{owner}.weight"] @ a.T)
    assert relative_difference([found[name] for name in names], expected) < 1e-5


def test_forward_gives_the_same_answer_and_leaves_no_gradient(shared: TrainingRuns) -> None:
    body = data_request([make_datum(RNG(2), 8, "cross_entropy")], "cross_entropy")
    forward = done(shared, "forward", body)
    assert gradients(shared) == {}
    assert forward.body == done(shared, "forward_backward", body).body
    assert gradients(shared) != {}
    shared.tenants[RUN].forget_gradients()


def adamw(x: np.ndarray, grads: list[np.ndarray], values: list[dict[str, float]]) -> np.ndarray:
    """AdamW of arXiv 1711.05101 algorithm 2, by itself, in float64."""
    m = np.zeros_like(x)
    v = np.zeros_like(x)
    for t, (g, c) in enumerate(zip(grads, values, strict=True), 1):
        m = c["beta1"] * m + (1 - c["beta1"]) * g
        v = c["beta2"] * v + (1 - c["beta2"]) * g * g
        rate = c["learning_rate"]
        x = x * (1 - rate * c["weight_decay"])
        corrected = np.sqrt(v / (1 - c["beta2"] ** t)) + c["eps"]
        x = x - rate * m / (1 - c["beta1"] ** t) / corrected
    return x


def test_a_step_uses_the_sum_of_the_gradients_and_the_values_of_its_call(model_path: Path) -> None:
    """The second step has a clip, the third no gradient at all."""
    runs = started(make_runs(model_path))
    values = [
        {"learning_rate": 0.01, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1},
        {"learning_rate": 0.02, "beta1": 0.8, "beta2": 0.9, "eps": 1e-4, "weight_decay": 0.0},
        {"learning_rate": 0.03, "beta1": 0.7, "beta2": 0.99, "eps": 1e-6, "weight_decay": 0.2},
    ]
    run = runs.tenants[RUN]
    before = {name: p.detach().double().numpy() for name, p in run.weights.items()}
    used: list[dict[str, np.ndarray]] = []
    for step, adam in enumerate(values):
        for call in range(2 if step < 2 else 0):
            body = data_request([make_datum(RNG(7 + call), 12, "ppo")], "ppo")
            done(runs, "forward_backward", body)
        found = {n: g.double().numpy() for n, g in gradients(runs).items()}
        used.append(found or {name: np.zeros_like(x) for name, x in before.items()})
        norm = float(np.sqrt(sum((g**2).sum() for g in used[-1].values())))
        clip = norm / 3 if step == 1 else 0.0
        if clip:
            used[-1] = {name: g / 3 for name, g in used[-1].items()}
        executed = done(runs, "optim_step", optim(**adam, grad_clip_norm=clip), step=step + 1)
        assert executed.version == step + 1
        metrics = msgspec.json.decode(executed.body)["metrics"]
        assert metrics == {"grad_norm": pytest.approx(norm, rel=1e-5)}
        assert gradients(runs) == {}
    for name, x in before.items():
        expected = adamw(x, [grads[name] for grads in used], values)
        np.testing.assert_allclose(run.weights[name].detach().numpy(), expected, atol=2e-6)
    assert done(runs, "optim_step", optim()).version == 4
    assert [step for step, _ in runs.reports] == [1, 2, 3], "a repetition is in the metrics already"
    assert [name for name in runs.reports[0][1] if describe(name) is None] == []
    assert runs.reports[0][1]["tokens/trained"] == 24
    assert runs.reports[2][1]["time/step_s"] == 0, "of the played clock; explain needs it"


def test_parts_of_a_batch_in_calls_or_rows_give_the_same_as_one(model_path: Path) -> None:
    data = [make_datum(RNG(4), 10, "cross_entropy", k) for k in (0, 3, 0, 0, 3)]
    found = []
    for parts, budget in (([data], 66), ([data], 22), ([data[:2], data[2:]], 66)):
        runs = started(make_runs(model_path, f"learner.budget_tokens={budget}"))
        bodies = [data_request(part, "cross_entropy") for part in parts]
        rows = [row for body in bodies for row in answer(done(runs, "forward_backward", body))[0]]
        found.append((rows, gradients(runs)))
    (rows, grads), *others = found
    for other_rows, other_grads in others:
        for first, second in zip(rows, other_rows, strict=True):
            np.testing.assert_allclose(first, second, atol=2e-5)
        assert relative_difference([other_grads[n] for n in grads], list(grads.values())) < 1e-5


def test_a_seed_or_the_name_of_a_run_gives_its_start(model_path: Path) -> None:
    alone = weights(started(make_runs(model_path)))
    runs = started(make_runs(model_path), OTHER, rank=8, seed=5)
    torch.manual_seed(99)
    assert equal(weights(started(runs)), alone)
    assert not equal(weights(started(make_runs(model_path), seed=4)), alone)
    first, again = (
        started(started(make_runs(model_path), seed=None), OTHER, seed=None) for _ in range(2)
    )
    assert equal(weights(first), weights(again))
    assert not equal(weights(first), weights(first, OTHER))


def test_runs_of_different_rank_do_not_reach_each_other(model_path: Path) -> None:
    def trained(runs: TrainingRuns, run_id: str, seed: int) -> None:
        for _ in range(2):
            body = data_request([make_datum(RNG(seed), 12, "ppo")], "ppo")
            done(runs, "forward_backward", body, run_id=run_id)
            done(runs, "optim_step", optim(run_id), run_id=run_id)

    alone = started(make_runs(model_path))
    trained(alone, RUN, 1)
    both = make_runs(model_path)
    started(started(both, OTHER, rank=2, train_mlp=False), RUN)
    trained(both, OTHER, 2)
    trained(both, RUN, 1)
    assert equal(weights(both), weights(alone))
    done(both, "restore", run_id=OTHER)
    before = weights(both)
    done(both, "forward_backward", data_request([make_datum(RNG(1), 12, "ppo")], "ppo"))
    assert equal(weights(both), before)
    assert gradients(both)


GOOD = make_datum(RNG(0), 6, "ppo")


def test_a_bad_datum_is_named_and_changes_nothing(model_path: Path) -> None:
    runs = started(make_runs(model_path, "learner.budget_tokens=40"))
    done(runs, "forward_backward", data_request([GOOD], "ppo"))
    before, others = gradients(runs), weights(runs)
    for field, values, reason in table(__file__, "bad_datums"):
        array = np.array(values)
        dtype = np.float32 if array.dtype.kind == "f" and len(values) else np.int64
        changed = GOOD | {field: array.astype(dtype)}
        executed = ask(runs, "forward_backward", data_request([GOOD, changed], "ppo"))
        assert executed.body == b""
        assert reason in executed.error
        assert equal(gradients(runs), before)
        assert equal(weights(runs), others)
    datum = make_datum(RNG(0), 6, "cross_entropy")
    datum["weights"] = np.full(6, 1e37, np.float32)
    executed = ask(runs, "forward_backward", data_request([datum], "cross_entropy"))
    assert "gradient is not finite" in executed.error
    assert equal(gradients(runs), before)


def test_a_missing_input_and_a_lost_mask_are_named(shared: TrainingRuns) -> None:
    without = {k: v for k, v in GOOD.items() if k != "advantages"}
    executed = ask(shared, "forward", data_request([without], "ppo"))
    assert "datum 0 lacks, or should not have, advantages; its loss needs adv" in executed.error
    masked = GOOD | {"sequence_ratio_mask": np.zeros(6, np.float32)}
    executed = ask(shared, "forward", data_request([masked], "gspo"))
    assert executed.error == "datum 0: sequence_ratio_mask marks no token"
    assert "no datum" in ask(shared, "forward", data_request([], "ppo")).error
    assert "not a ForwardBackwardRequest" in ask(shared, "forward", b"\xff\xff").error


def test_runs_and_steps_that_cannot_be_made_are_refused(model_path: Path) -> None:
    runs = make_runs(model_path)
    nothing = create(train_mlp=False, train_attn=False)
    for body, reason in ((nothing, "set train_attn or train_mlp"), (b"{", "bad request")):
        assert reason in ask(runs, "create_model", body).error
        assert "its create_model was refused" in ask(runs, "optim_step", optim()).error
    before = weights(started(runs))
    reason = "Expected `float` >= 1e-30 - at `$.adam_params.eps`"
    assert reason in ask(runs, "optim_step", optim(eps=0.0)).error
    assert "bad request" in ask(runs, "optim_step", optim(beta2=1.0)).error
    assert equal(weights(runs), before)


def test_all_weights_can_be_trained_in_turns(model_path: Path, tmp_path: Path) -> None:
    runs = make_runs(model_path, service=("rollout.fn=tinker", "model.lora=none"))
    done(runs, "create_model", create(rank=0))
    base = weights(runs)
    datum = make_datum(RNG(1), 20, "cross_entropy")
    done(runs, "forward_backward", data_request([datum], "cross_entropy"))
    done(runs, "optim_step", optim(weight_decay=0.1, grad_clip_norm=0.5))
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    (-plain_logprobs(model, datum) * torch.tensor(datum["weights"])).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    adam = torch.optim.AdamW(model.parameters(), 0.01, (0.9, 0.95), 1e-12, weight_decay=0.1)
    adam.step()
    found = weights(runs)
    for name, expected in model.named_parameters():
        torch.testing.assert_close(found[name], expected.detach(), atol=1e-5, rtol=1e-4)
    for operation, name in (
        ("save_weights_for_sampler", "sampler"),
        ("save_weights_external", "merged"),
        ("save_state", "state"),
    ):
        kind: Any = operation
        done(runs, kind, path=tmp_path / name)
    saved = load_file(tmp_path / "sampler" / "model.safetensors")
    assert equal(saved, {name: x for name, x in found.items() if name in saved})
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
    assert equal(dict(exported.named_parameters()), saved)
    assert "cannot be trained here" in ask(runs, "create_model", create(), run_id=OTHER).error
    # Another run has the base model, and the first one continues where it was.
    done(runs, "create_model", create(rank=0), run_id=OTHER)
    assert list(runs.tenants) == [OTHER]
    assert equal(weights(runs, OTHER), base)
    done(runs, "restore", path=tmp_path / "state")
    assert equal(weights(runs), found)
    adapters = make_runs(model_path)
    assert "cannot be trained here" in ask(adapters, "restore", path=tmp_path / "state").error


def test_a_sampler_directory_is_the_merged_model_of_the_parts_that_are_trained(
    model_path: Path, tmp_path: Path
) -> None:
    """Both are read by libraries of others."""
    from peft import PeftModel

    runs = started(make_runs(model_path), rank=3, train_mlp=False)
    started(runs, OTHER, rank=5, train_attn=False)
    parts = {
        RUN: ["k_proj", "o_proj", "q_proj", "v_proj"],
        OTHER: ["down_proj", "gate_proj", "up_proj"],
    }
    (model_path / "tokenizer.json").write_text("{}")
    for run_id, seed in ((RUN, 1), (OTHER, 2)):
        body = data_request([make_datum(RNG(seed), 20, "ppo")], "ppo")
        done(runs, "forward_backward", body, run_id=run_id)
        done(runs, "optim_step", optim(run_id, learning_rate=0.05), run_id=run_id)
        folder = tmp_path / run_id.replace(":", ".")
        for operation, name in (
            ("save_weights_for_sampler", "sampler"),
            ("save_weights_external", "merged"),
        ):
            for _ in range(2):  # a directory of that name is replaced
                done(runs, operation, run_id=run_id, path=folder / name)
        described = json.loads((folder / "sampler" / "adapter_config.json").read_text())
        assert (described["r"], described["lora_alpha"]) == (3 if run_id == RUN else 5, 16)
        assert described["base_model_name_or_path"] == str(model_path)
        assert described["target_modules"] == parts[run_id]
        assert (folder / "merged" / "tokenizer.json").read_text() == "{}"
        merged = AutoModelForCausalLM.from_pretrained(folder / "merged").eval()
        base = AutoModelForCausalLM.from_pretrained(model_path)
        adapted = PeftModel.from_pretrained(base, folder / "sampler").eval()
        datum = make_datum(RNG(9), 20, "cross_entropy")
        with torch.no_grad():
            expected = plain_logprobs(merged, datum)
            assert (expected - plain_logprobs(adapted, datum)).abs().max() < 1e-5
        body = data_request([datum], "cross_entropy")
        ((row,), _) = answer(done(runs, "forward", body, run_id=run_id))
        assert abs(row - expected.numpy()).max() < 2e-5
    first, second = (tmp_path / r.replace(":", ".") / "merged" for r in (RUN, OTHER))
    assert (first / "model.safetensors").read_bytes() != (second / "model.safetensors").read_bytes()


def test_no_bytes_of_a_request_end_the_process(model_path: Path) -> None:
    """Whatever is refused leaves gradients and weights as they were; whatever is accepted harms
    the run that sent it alone.
    """
    runs = started(started(make_runs(model_path)), OTHER)
    untouched = weights(runs, OTHER)
    soft = [make_datum(RNG(0), 5, "cross_entropy", k) for k in (0, 2)]
    bodies = [data_request(soft, "cross_entropy"), data_request([GOOD], "gspo"), optim(), create()]
    operations: list[Operation] = ["forward_backward", "forward", "optim_step", "create_model"]
    rng = RNG(5)
    num_refused = 0
    for _ in range(100):
        index = int(rng.integers(len(bodies)))
        content = np.frombuffer(bodies[index], np.uint8).copy()
        places = rng.integers(0, len(content), rng.integers(1, 4))
        content[places] = rng.integers(0, 256, len(places))
        before = gradients(runs), weights(runs)
        executed = ask(runs, operations[index], content.tobytes())
        if executed.error:
            num_refused += 1
            assert equal(gradients(runs), before[0])
            assert equal(weights(runs), before[1])
    assert num_refused > 20
    assert equal(weights(runs, OTHER), untouched)
    done(runs, "forward_backward", bodies[0], run_id=OTHER)


def test_datums_that_begin_alike_share_their_tokens_and_give_the_same(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two samples of a prompt, one that continues the second, one of another prompt, and again one
    with the tokens of the first.
    """
    rng = RNG(6)
    prompt, other = rng.integers(0, VOCABULARY, 12), rng.integers(0, VOCABULARY, 12)
    second = np.concatenate([prompt, rng.integers(0, VOCABULARY, 7)])
    rows = [
        np.concatenate([prompt, rng.integers(0, VOCABULARY, 4)]),
        second,
        np.concatenate([second, rng.integers(0, VOCABULARY, 5)]),
        np.concatenate([other, rng.integers(0, VOCABULARY, 3)]),
        prompt,
    ]
    for loss, alternatives in (("ppo", 0), ("cross_entropy", 3)):
        data = [
            make_datum(rng, len(tokens), loss, alternatives) | {"tokens": tokens} for tokens in rows
        ]
        if not alternatives:
            # As recipes send them: no token is predicted within the prompt.
            data[0]["target_tokens"][:11] = data[1]["target_tokens"][:11] = 0
        body = data_request(data, loss)
        found = []
        sizes = []
        for least in (8, 1000):
            monkeypatch.setattr(losses, "LEAST_SHARED", least)
            runs = started(make_runs(model_path, "learner.budget_tokens=60"))
            passes = spy_on_rows(runs, monkeypatch)
            executed = done(runs, "forward_backward", body)
            found.append((answer(executed), list(gradients(runs).values())))
            sizes.append(sum(row.input_ids.shape[1] for row in passes))
        assert sizes == [12 + 4 + 7 + 5 + 15 + 12, 16 + 19 + 24 + 15 + 12]
        (first, metrics), (apart, others) = found[0][0], found[1][0]
        assert metrics == {"loss:sum": pytest.approx(others["loss:sum"], rel=1e-5)}
        for one, two in zip(first, apart, strict=True):
            np.testing.assert_allclose(one, two, atol=2e-5)
        assert relative_difference(found[0][1], found[1][1]) < 1e-5


def spy_on_rows(runs: TrainingRuns, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Collects the rows that the model computes."""
    rows: list[Any] = []
    backbone = runs.policy.lm.base_model
    forward = backbone.forward

    def spy(*, input_ids: torch.Tensor, **arguments: Any) -> Any:
        rows.append(SimpleNamespace(input_ids=input_ids))
        return forward(input_ids=input_ids, **arguments)

    monkeypatch.setattr(backbone, "forward", spy)
    return rows


def test_sparse_targets_are_those_with_zeros_in_the_other_cells(shared: TrainingRuns) -> None:
    dense = make_datum(RNG(8), 6, "cross_entropy", 4)
    is_there = RNG(9).random((6, 4)) < 0.6
    for name in ("target_tokens", "weights"):
        dense[name] = np.where(is_there, dense[name], 0).astype(dense[name].dtype)
    request = proto.ForwardBackwardRequest()
    request.ParseFromString(data_request([dense], "cross_entropy"))
    expected = done(shared, "forward", request.SerializeToString()).body
    for name in ("target_tokens", "weights"):
        tensor = request.data[0].loss_fn_inputs[name]
        tensor.sparse_csr.values = dense[name][is_there].tobytes()
        tensor.sparse_csr.crow_indices = np.cumsum([0, *is_there.sum(1)]).astype("<i8").tobytes()
        tensor.sparse_csr.col_indices = np.nonzero(is_there)[1].astype("<i8").tobytes()
    assert done(shared, "forward", request.SerializeToString()).body == expected
    # A few bytes that describe more than fits into memory.
    request.data[0].loss_fn_inputs["weights"].shape[1] = 2**50
    executed = ask(shared, "forward", request.SerializeToString())
    shape = (6, 2**50)
    assert executed.error == f"datum 0: weights: it is not a CSR matrix of the shape {shape}"
