"""Samples, checkpoints, origins, ends of sessions and bad input, over the real app."""

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from service_support import (
    KEY,
    MODEL,
    Front,
    Played,
    batch,
    client_of,
    folder,
    front,
    open_desk,
)
from tables import table

from async_rl.core.errors import Unavailable
from async_rl.runs.certificate.certify import service
from async_rl.service.address import FOLDER
from async_rl.service.forms import DEVIATIONS
from async_rl.service.proto import Datum, ForwardBackwardOutput, ProvenanceSpan, encode_batch
from async_rl.service.store import Checkpoint, Request, Store

PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}, {"tokens": [3]}]}
DAY_S = 86_400


async def sampler_of(api: Front, number: int = 0, **more: Any) -> str:
    body = {"session_id": api.session_id or await api.session(), "sampling_session_seq_id": number}
    reply = await api.http.post("create_sampling_session", json={**body, **more})
    assert reply.status_code == 200, reply.text
    return str(reply.json()["sampling_session_id"])


def ask(sampler: str, seq_id: int = 0, **more: Any) -> dict[str, Any]:
    body = {"sampling_session_id": sampler, "seq_id": seq_id, "prompt": PROMPT}
    return {**body, "sampling_params": {"max_tokens": 3}, **more}


async def test_values_of_a_sample_reach_the_generators(tmp_path: Path) -> None:
    played = Played()
    async with front(tmp_path, played) as api:
        sampler = await sampler_of(api, base_model=MODEL.name)
        for seq_id, stop in enumerate((None, [], "a", ["a", "b"], [4, 5])):
            params = {"stop": stop, "temperature": 0.5, "top_k": 7, "top_p": 0.5, "seed": -3}
            await api.samples(
                await api.post("asample", **ask(sampler, seq_id, sampling_params=params))
            )
        stops = [(sample.stop_texts, sample.stop_ids) for sample in played.sampled]
        assert stops == [((), None), ((), ()), (("a",), None), (("a", "b"), None), ((), (4, 5))]
        first = played.sampled[0]
        assert (first.temperature, first.top_k, first.top_p, first.seed) == (0.5, 7, 0.5, -3)
        # As many tokens as fit.
        assert first.max_tokens == MODEL.context_tokens - 3
        assert first.token_ids.tolist() == [1, 2, 3]


async def test_a_sample_is_refused_by_its_engine_or_stopped_by_its_client(tmp_path: Path) -> None:
    played = Played()
    stopped: list[str] = []

    async def forever(request: Any) -> Any:
        played.has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            stopped.append(request.request_id)

    async with front(tmp_path, played) as api:
        sampler = await sampler_of(api)
        hot = await api.post("asample", **ask(sampler, 1, sampling_params={"temperature": 99}))
        refused = {"error": "the engine refuses this temperature", "category": "user"}
        assert await api.result(hot) == refused
        played.sample = forever  # type: ignore[method-assign]
        request_id = await api.post("asample", **ask(sampler))
        await played.has_begun.wait()
        await api.http.post("cancel_future", json={"request_id": request_id})
        assert "cancelled" in (await api.result(request_id))["error"]
        assert stopped == [request_id]


async def saved(api: Front, run: str, seq_id: int, path: str, **more: Any) -> Any:
    body = {"model_id": run, "seq_id": seq_id, "path": path, **more}
    reply = await api.http.post("save_weights", json=body)
    return await api.result(reply.json()["request_id"])


async def shown(api: Front, path: str, field: str) -> Any:
    return (await api.http.get(path)).json()[field]


async def test_checkpoints_are_listed_replaced_expired_and_deleted(tmp_path: Path) -> None:
    played = Played()
    async with front(tmp_path, played) as api:
        run = await api.create(user_metadata={"goal": 7})
        one = await saved(api, run, 1, "one", user_metadata={"n": "1"})
        assert one == {"path": f"tinker://{run}/weights/one", "type": "save_weights"}
        assert "exists" in (await saved(api, run, 2, "one"))["error"]
        played.clock.now_s += 1
        await saved(api, run, 3, "one", overwrite=True, ttl_seconds=3600)
        played.clock.now_s += 1
        await saved(api, run, 4, "two.b")
        for seq_id, wrong in enumerate(("../up", "a/b", "", ".hidden"), start=5):
            assert "$.path" in (await saved(api, run, seq_id, wrong))["error"]
        listed = await shown(api, f"training_runs/{run}/checkpoints", "checkpoints")
        assert [row["checkpoint_id"] for row in listed] == ["weights/two.b", "weights/one"]
        assert listed[-1]["checkpoint_type"] == "training"
        assert listed[-1]["expires_at"] > listed[-1]["time"]
        assert listed[-1]["size_bytes"] > 0
        page = (await api.http.get("checkpoints", params={"limit": 1, "offset": 1})).json()
        assert page["cursor"] == {"limit": 1, "offset": 1, "total_count": len(listed)}
        assert page["checkpoints"] == listed[1:2]
        of_run = (await api.http.get(f"training_runs/{run}")).json()
        assert of_run["last_checkpoint"] == listed[0]
        assert of_run["user_metadata"] == {"goal": "7"}
        assert await shown(api, "training_runs", "training_runs") == [of_run]
        assert await shown(api, "sessions", "sessions") == [api.session_id]
        assert await shown(api, f"sessions/{api.session_id}", "training_run_ids") == [run]
        info = await api.http.post("weights_info", json={"tinker_path": one["path"]})
        assert (info.json()["lora_rank"], info.json()["train_mlp"]) == (8, True)
        # The replaced files go, and then the expired ones.
        directory = tmp_path / "runs" / folder(run) / "weights"
        assert (directory / "one~1").exists()
        await api.desk.sweep()
        assert not (directory / "one~1").exists()
        assert (directory / "one~3").exists()
        played.clock.now_s += 3601
        await api.desk.sweep()
        assert not (directory / "one~3").exists()
        info = await api.http.post("weights_info", json={"tinker_path": one["path"]})
        assert info.status_code == 404
        two = f"training_runs/{run}/checkpoints/weights/two.b"
        end_s = played.clock.now_s + 3600
        for seconds, status, expires_s in ((3600, 200, end_s), (5, 400, end_s), (None, 200, None)):
            reply = await api.http.put(f"{two}/ttl", json={"ttl_seconds": seconds})
            assert reply.status_code == status
            (row,) = api.desk.store.all(Checkpoint, "path LIKE '%two.b'")
            assert row.expires_s == expires_s
        assert (await api.http.delete(two)).status_code == 200
        assert (await api.http.delete(two)).status_code == 404


async def test_exported_weights_are_files_of_the_shared_disk(tmp_path: Path) -> None:
    async with front(tmp_path, Played()) as api:
        run = await api.create()
        export = {"model_id": run, "seq_id": 1, "path": "out"}
        answer = await api.result(await api.post("save_weights_external", **export))
        assert answer["path"] == f"tinker://{run}/external_weights/out"
        listed = f"training_runs/{run}/checkpoints/external_weights/out/external_weights_urls"
        address = (await shown(api, listed, "urls"))["state.json"]
        with await asyncio.to_thread(urllib.request.urlopen, address) as file:
            assert json.loads(file.read())["version"] == 0


async def origin(api: Front, **lies: Any) -> Any:
    """The answer to a batch of a sampled sequence that names its origin, with lies in it."""
    run = await api.create()
    save = {"model_id": run, "seq_id": 1, "sampling_session_seq_id": 0}
    await api.result(await api.post("save_weights_for_sampler", **save))
    sampler = f"{api.session_id}:sample:0"
    if lies.get("is_of_base"):
        sampler = await sampler_of(api, 1)
    reply = (await api.http.post("asample", json=ask(sampler))).json()
    sequence = reply["sample_sequence_ids"][0]
    await api.samples(reply["request_id"])
    for seq_id in (2, 3):
        await api.step(run, seq_id)
    name = lies.get("name", sequence)

    def span(kind: str, offset: int, length: int) -> Any:
        part = {"sequence_id": name, "offset": offset, "length": length}
        return ProvenanceSpan(**{f"{kind}_tokens": part})

    # Sampled: 6 7 8 after 1 2 3.
    logprobs = lies.get("logprobs", [0, 0, -0.0, -1 / 7, -2 / 7])
    datum = Datum(
        tokens=np.array(lies.get("tokens", [1, 2, 3, 6, 7])),
        inputs={
            "target_tokens": np.array(lies.get("targets", [2, 3, 6, 7, 8])),
            "logprobs": np.array(logprobs, np.float32),
        },
        input_spans=[span("prompt", 0, 3), span("sampled", 0, 2)],
        target_spans=[span("prompt", 1, 2), span("sampled", *lies.get("sampled", (0, 3)))],
    )
    reply = await api.http.post(
        "forward_backward", content=encode_batch([datum], run, 4, "ppo", {})
    )
    return await api.wait(reply.json()["request_id"])


@pytest.mark.parametrize("is_of_base", [False, True])
async def test_trained_tokens_that_the_run_has_sampled_have_an_age(
    tmp_path: Path, is_of_base: bool
) -> None:
    async with front(tmp_path, Played()) as api:
        answer = await origin(api, is_of_base=is_of_base)
        metrics = dict(ForwardBackwardOutput.FromString(answer.content).metrics)
        del metrics["loss:sum"]
        assert metrics == ({} if is_of_base else {"age_mean:mean": 2, "age_max:max": 2})
        # Each drawn sequence is shown with the version of each of its tokens.
        (drawn,) = api.desk.store.all(Request, "kind='sample'")
        sequence = (await api.http.get(f"samples/{drawn.request_id}.0")).json()
        assert sequence.pop("logprobs") == pytest.approx([0, -1 / 7, -2 / 7])
        run = "" if is_of_base else f"{api.session_id}:train:0"
        assert sequence == {"model_id": run, "tokens": [6, 7, 8], "versions": [0] * 3}


async def test_a_lie_about_an_origin_is_refused_with_its_first_wrong_token(tmp_path: Path) -> None:
    for index, (lie, message) in enumerate(table(__file__, "lies")):
        played = Played()
        async with front(tmp_path / str(index), played) as api:
            answer = (await origin(api, **lie)).json()
        assert answer["category"] == "user"
        assert answer["error"].startswith(("datum 0: ", "no sequence"))
        assert message in answer["error"]
        assert played.executed[-1][2] == "optim_step"


async def test_a_silent_session_leaves_the_learner_and_comes_back(tmp_path: Path) -> None:
    played = Played()
    async with front(tmp_path, played) as api:
        run = await api.create()
        await api.batch(run, 1, [1, 2])
        await api.result(await api.step(run, 2))
        chain = played.memory[run].chain
        played.clock.now_s += 200
        await api.http.post("session_heartbeat", json={"session_id": api.session_id})
        for silent_s, released in ((200, []), (301, [run]), (0, [run])):
            played.clock.now_s += silent_s
            await api.desk.sweep()
            await api.settle()
            assert played.released == released
        assert run not in played.memory
        await api.forward_backward_result(await api.batch(run, 3, [1], forward_only=True))
        assert played.memory[run].chain == chain


async def test_time_without_a_front_is_no_silence_of_a_client(tmp_path: Path) -> None:
    played = Played()
    async with front(tmp_path, played) as api:
        session_id = await api.session()
    played.clock.now_s += 2 * DAY_S
    async with front(tmp_path, played) as api:
        await api.desk.sweep()
        beat = await api.http.post("session_heartbeat", json={"session_id": session_id})
        assert beat.status_code == 200


async def test_a_finished_session_refuses_requests_and_loses_samplers(tmp_path: Path) -> None:
    played = Played()
    async with front(tmp_path, played) as api:
        run = await api.create()
        save = {"model_id": run, "seq_id": 1, "sampling_session_seq_id": 0}
        await api.result(await api.post("save_weights_for_sampler", **save))
        directory = tmp_path / "runs" / folder(run) / "sampler_weights" / "~1"
        assert directory.exists()
        for reason in ("success", "errored"):
            body = {"reason": {"type": reason}, "detail": None}
            path = f"sessions/{api.session_id}/finish"
            assert (await api.http.post(path, json=body)).status_code == 200
        beat = await api.http.post("session_heartbeat", json={"session_id": api.session_id})
        assert (beat.status_code, "(success)" in beat.json()["detail"]) == (410, True)
        step = {"model_id": run, "seq_id": 2, "adam_params": {}}
        assert (await api.http.post("optim_step", json=step)).status_code == 410
        await api.desk.sweep()
        await api.settle()
        assert played.released == [run]
        assert not directory.exists()


async def test_answers_are_kept_for_minutes_and_numbers_for_ever(tmp_path: Path) -> None:
    played = Played()
    async with front(tmp_path, played) as api:
        run = await api.create()
        step = {"model_id": run, "seq_id": 1, "adam_params": {}}
        request_id = await api.post("optim_step", **step)
        answer = await api.result(request_id)
        played.clock.now_s += 599
        await api.desk.sweep()
        assert await api.result(request_id) == answer
        played.clock.now_s += 2
        await api.desk.sweep()
        gone = await api.http.post("retrieve_future", json={"request_id": request_id})
        assert gone.status_code == 410
        assert await api.post("optim_step", **step) == request_id
        unread = await api.post("optim_step", **{**step, "seq_id": 2})
        await api.settle()
        played.clock.now_s += DAY_S - 1
        await api.desk.sweep()
        assert await api.result(unread)


DEEP = b'{"a": ' + b"[" * 100_000
BAD: list[tuple[str, Any, int, str]] = [
    ("create_session", b"{", 400, "bad request"),
    ("create_session", DEEP, 400, "bad request"),
    ("optim_step", b'{"model_id": "RUN", "seq_id": 1, "x": NaN}', 400, "bad request"),
    ("forward_backward", b"\xff\xff\xff\xff", 400, "not a ForwardBackwardRequest"),
    ("forward_backward", batch("invented", 1, [1]), 404, "invented"),
    ("asample", ask("SAMPLER", prompt={"chunks": [{"tokens": [1] * 64}]}), 400, "64 tokens"),
]


async def test_bad_input_is_answered_in_the_form_of_the_api(tmp_path: Path) -> None:
    played = Played()
    wrong_samples = (
        ("asample", ask("SAMPLER", **more), 400, text)
        for more, text in table(__file__, "bad_samples")
    )
    async with front(tmp_path, played) as api:
        run = await api.create()
        sampler = await sampler_of(api)
        names = {"RUN": run, "SESSION": api.session_id, "SAMPLER": sampler}
        for path, body, status, text in (*BAD, *table(__file__, "bad_requests"), *wrong_samples):
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            for name, value in names.items():
                content = content.replace(name.encode(), value.encode())
            reply = await api.http.post(path, content=content)
            assert reply.status_code == status, (path, body, reply.text)
            assert reply.headers["content-type"] == "application/json"
            assert text in reply.json()["detail"], (path, body, reply.text)
        large = await api.http.post("forward_backward", content=b" " * ((128 << 20) + 1))
        assert (large.status_code, "128 MB" in large.json()["detail"]) == (413, True)
        assert (await api.http.get("training_runs", params={"limit": -1})).status_code == 400
        assert (await api.http.get("samplers/invented")).status_code == 404
        assert await api.forward_backward_result(await api.batch(run, 1, [1, 2]))
        assert len((await api.samples(await api.post("asample", **ask(sampler)))).sequences) == 1
    assert [entry[2] for entry in played.executed] == ["create_model", "forward_backward"]


async def test_paths_that_are_no_checkpoint_of_the_right_kind_are_refused(tmp_path: Path) -> None:
    async with front(tmp_path, Played()) as api:
        run = await api.create()
        path = (await saved(api, run, 1, "one"))["path"]
        new = {"session_id": api.session_id, "model_seq_id": 5, "optimizer": True}
        invented = ("tinker://other/weights/one", "/etc/passwd", f"{path}/..", path[:-1])
        for wrong in invented:
            reply = await api.http.post("load_weights", json={**new, "path": wrong})
            assert (reply.status_code, wrong in reply.json()["detail"]) == (404, True)
        body = {"session_id": api.session_id, "sampling_session_seq_id": 3, "model_path": path}
        reply = await api.http.post("create_sampling_session", json=body)
        assert "has weights; this needs sampler_weights" in reply.json()["detail"]
        load = {"model_id": run, "seq_id": 2, "path": "tinker://a/b/c", "optimizer": True}
        assert "never saved" in (await api.result(await api.post("load_weights", **load)))["error"]


async def test_every_request_needs_the_key(tmp_path: Path) -> None:
    desk = open_desk(tmp_path, Played())
    async with client_of(desk) as http:
        for key in ("", KEY[:-1], "ü"):
            headers = {"X-API-Key": key.encode()}
            for path in ("create_session", "retrieve_future"):
                reply = await http.post(path, json={}, headers=headers)
                assert (reply.status_code, "X-API-Key" in reply.json()["detail"]) == (401, True)
            assert (await http.get("healthz", headers=headers)).json() == {"status": "ok"}
    desk.store.close()


async def test_the_start_of_a_session_and_the_page_name_all_deviations(tmp_path: Path) -> None:
    async with front(tmp_path, Played()) as api:
        reply = (await api.http.post("create_session", json={"sdk_version": "0.99"})).json()
    page = (Path(__file__).parents[2] / "docs" / "service.md").read_text().splitlines()
    for name, text in DEVIATIONS.items():
        assert f"{name}: {text}" in reply["warning_message"]
        assert f"| {name} | {text} |" in page


async def test_the_files_of_an_open_sampler_stay_and_older_ones_go(tmp_path: Path) -> None:
    played = Played()
    async with front(tmp_path, played) as api:
        run = await api.create()
        folders = tmp_path / "runs" / folder(run) / "sampler_weights"
        save = {"model_id": run, "seq_id": 1, "path": "one"}
        path = (await api.result(await api.post("save_weights_for_sampler", **save)))["path"]
        await sampler_of(api, 7, model_path=path)
        for seq_id in (2, 3):
            inflight = {"sampling_session_seq_id": seq_id, "kind": "inflight"}
            await api.result(
                await api.post("save_weights_for_sampler", model_id=run, seq_id=seq_id, **inflight)
            )
        await api.http.delete(f"training_runs/{run}/checkpoints/sampler_weights/one")
        await api.desk.sweep()
        assert {it.name for it in folders.iterdir()} == {"one~1", "~3"}
        # The older sampler of the same slot has the newer weights.
        request_id = await api.post("asample", **ask(f"{api.session_id}:sample:2"))
        await api.samples(request_id)
        newest = (folder(run), str(folders / "~3"))
        assert (played.sampled[-1].policy, played.sampled[-1].adapter) == newest
        end = {"reason": {"type": "success"}}
        await api.http.post(f"sessions/{api.session_id}/finish", json=end)
        await api.desk.sweep()
        assert list(folders.iterdir()) == []


async def test_too_many_samples_of_a_session_are_sent_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_rl.service.desk.MOST_SAMPLES", 1)
    played = Played()
    played.sample = lambda request: asyncio.Event().wait()  # type: ignore[assignment, method-assign]
    async with front(tmp_path, played) as api:
        sampler = await sampler_of(api)
        await api.post("asample", **ask(sampler))
        full = await api.http.post("asample", json=ask(sampler, 1))
        assert full.status_code == 429, full.text
        assert full.headers["retry-after"] == "1"
        await api.session()
        await api.post("asample", **ask(await sampler_of(api)))


async def test_a_session_has_a_limited_number_of_training_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_rl.service.desk.MOST_RUNS", 1)
    async with front(tmp_path, Played()) as api:
        run = await api.create()
        assert await api.create() == run, "the same request again"
        with pytest.raises(AssertionError, match="has 1 training runs; unload one of them"):
            await api.create(1)
        await api.result(await api.post("unload_model", model_id=run))
        await api.create(1)
        await api.session()
        await api.create()


async def test_a_second_front_does_not_open_the_table(tmp_path: Path) -> None:
    async with front(tmp_path, Played()):
        with pytest.raises(Unavailable, match=r"requests\.sqlite is written by another process"):
            Store(tmp_path)
    Store(tmp_path).close()


async def test_the_certificate_says_what_is_missing_and_what_is_damaged(tmp_path: Path) -> None:
    def verdicts() -> list[tuple[str, str]]:
        return [(it.verdict.value, it.evidence[0]) for it in service(tmp_path)]

    with pytest.raises(Unavailable, match="the service has accepted nothing yet"):
        verdicts()
    async with front(tmp_path / FOLDER, Played()) as api:
        run = await api.create()
        for number in range(1, 4):
            await api.result(await api.step(run, number))
        assert verdicts() == [
            ("holds", "1 training runs; 4 requests, 4 answered"),
            ("holds", "0 checkpoints and weights of samplers"),
        ]
        await saved(api, run, 4, "a")
        # The played learner writes no checksums.
        verdict, evidence = verdicts()[1]
        assert (verdict, "a~4/sha256sums.txt cannot be read" in evidence) == ("broken", True)
        api.desk.store.change("DELETE FROM requests WHERE seq_id=2")
        assert verdicts()[0] == ("broken", f"{run} lacks 1 requests")
