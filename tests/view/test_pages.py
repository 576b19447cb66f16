"""The pages of `async-rl view`: what they show, what they refuse, and that they only read."""

import hashlib
import re
from pathlib import Path

import members
import pytest
from starlette.testclient import TestClient
from tables import table
from view_support import HOSTILE

from async_rl.runs import status
from async_rl.runs.view import library
from async_rl.runs.view.library import Library
from async_rl.runs.view.server import build_app


def open_view(directory: Path) -> TestClient:
    """A browser that has opened the printed link."""
    client = TestClient(build_app(Library(directory), token="secret"))
    assert client.get("/?token=secret").status_code == 200
    return client


@pytest.fixture(scope="module")
def client(directory: Path) -> TestClient:
    return open_view(directory)


def text(client: TestClient, address: str) -> str:
    reply = client.get(address)
    assert reply.status_code == 200, reply.text
    return reply.text


PAGES = (
    *("/", "/curves?run=one&run=two&section=eval", "/compare?run=one&run=two", "/runs/one"),
    *("/runs/one?step=1", "/runs/one/groups/1", "/runs/one/samples", "/runs/one/certificate"),
    *("/runs/one/samples?sort=worst&failed=1&text=text", "/runs/one/samples?prompt_id=t1"),
)


def test_pages_escape_text_load_nothing_write_nothing(client: TestClient, directory: Path) -> None:
    def digest() -> dict[str, str]:
        files = (path for path in directory.rglob("*") if path.is_file())
        return {
            str(path): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in files
            if not path.name.endswith(("-wal", "-shm"))  # SQLite's own, also of a reader
        }

    before = digest()
    for address in (*PAGES, "/runs/three"):
        reply = client.get(address)
        page = reply.text
        assert (reply.status_code == 200) == (address in PAGES), page
        assert not re.findall("<script>alert|<img|<b>w2", page)
        assert HOSTILE not in page
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert not re.findall(r'(?:src|href)="(?:https?:)?//', page)
        assert " style=" not in page, "the policy would ignore it"
        assert not re.findall(r" on\w+=", page.replace("onerror=alert(2)", ""))
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in text(client, "/runs/one/groups/1")
    assert digest() == before
    assert client.post("/").status_code == 405


def test_runs_are_listed_with_their_results(client: TestClient) -> None:
    page = text(client, "/")
    assert re.findall(r'href="/runs/(\w+)"', page) == ["two", "one"], "the newest first, no other"
    assert re.findall(r"\d+ of \d+", page)[0].startswith("30 of ")
    assert '<td class="n">0.750 ± 0.050</td>' in page
    assert '<td class="n">0.750 at 30</td>' in page


def test_curves_of_two_runs_share_their_axes(client: TestClient) -> None:
    page = text(client, "/curves?run=one&run=two")
    chart = page[page.index("1 reward") :]
    low, high = map(float, re.findall(r'data-y="(\S+) (\S+)"', chart)[0])
    assert low < 0.4 / 30
    assert high > 0.8
    lines = re.findall(r'<polyline class="c(\d)" points="([^"]+)" data-label="(\w+)"', chart)[:2]
    assert [(colour, label) for colour, _, label in lines] == [("0", "one"), ("1", "two")]
    ends = [float(points.split()[-1].partition(",")[2]) for _, points, _ in lines]
    assert ends[0] < ends[1], "the larger value is higher"
    page = text(client, "/curves?run=one&section=eval")
    assert re.findall(r"<figcaption>(\S+)", page) == ["eval/pass_at_1", "eval/pass_at_1_error"]
    assert "<option>wait_s</option>" in page
    page = text(client, "/compare?run=one&run=two")
    assert "the runs first differ at step 1: metric, reward/mean" in page
    rows = re.findall(r"<td>reward/mean</td><td>([^<]+)</td><td>([^<]+)</td>", page)
    assert rows == [("0.7333", "0.3667")]
    assert page.count("<figure") == 2


def test_groups_are_filtered_and_a_wrong_address_is_explained(client: TestClient) -> None:
    for query, groups in table(__file__, "groups_are_filtered"):
        page = text(client, f"/runs/one/samples?{query}")
        assert [int(group) for group in re.findall(r"/groups/(\d+)", page)] == groups, query
    for address, reason in table(__file__, "wrong"):
        reply = client.get(address)
        assert reply.status_code == 404
        assert reason in reply.text


def test_a_token_shows_its_values(client: TestClient) -> None:
    page = text(client, "/runs/one/groups/3")
    hints = re.findall(r'title="(token 3, [^"]+)"', page)
    assert hints[0] == "token 3, probability 0.607, version 0", hints
    assert "wrong answer" not in page
    assert "wrong answer" in text(client, "/runs/one/groups/1")


def test_the_groups_of_a_step_and_the_ages_are_drawn(client: TestClient) -> None:
    page = text(client, "/runs/one?step=2")
    assert re.findall(r'<rect class="(\w+)" x="[\d.]+" width', page).count("leased") == 2
    ages = re.findall(r"<tr><th>(\d+)</th>.*?>(\d+) <small>", page[page.index("Staleness") :])
    assert ages == [("0", "2"), ("1", "2")]


def test_every_request_needs_the_token_and_no_other_site_has_it(directory: Path) -> None:
    app = build_app(Library(directory), token="secret")
    client = TestClient(app, base_url="http://127.0.0.1:8200", follow_redirects=False)
    for address in (*PAGES, "/static/view.js", "/?token=wrong", "/?token="):
        assert client.get(address).status_code == 401, address
    first = client.get("/runs/one?step=2&token=secret")
    assert first.status_code == 303
    assert first.headers["location"] == "/runs/one?step=2"
    cookie = first.headers["set-cookie"].lower()
    assert "httponly" in cookie
    assert "samesite=strict" in cookie
    assert client.get("/runs/one").status_code == 200
    # DNS rebinding: the same port under the name of another site, to which no browser sends it.
    assert client.get("http://evil.example:8200/runs/one").status_code == 401
    # Two servers on one host do not overwrite the cookie of each other.
    second = build_app(Library(directory), token="other-token")
    other = TestClient(second, base_url="http://127.0.0.1", cookies=dict(client.cookies))
    assert other.get("/?token=other-token").is_success
    client.cookies.update(other.cookies)
    assert client.get("/runs/one").status_code == 200


def test_new_rows_appear_and_repeated_steps_replace_old_ones(tmp_path: Path) -> None:
    from async_rl.runs.metrics import Curves

    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1, "time_s": 1, "a": 1}\n{"step": 2, "time_s": 2, "a": 2}\n{"st')
    curves = Curves(tmp_path)
    curves.refresh()
    assert [list(values) for values in curves.points("a")] == [[1, 2], [1, 2]]
    with file.open("a") as more:
        more.write('ep": 3, "time_s": 3, "b": 5}\n{"step": 2, "time_s": 4, "a": 7, "b": null}\n')
    curves.refresh()
    assert [list(values) for values in curves.points("a")] == [[1, 2], [1, 7]]
    assert [list(values) for values in curves.points("b")] == [[3], [5]]
    assert [list(values) for values in curves.points("b", x="time_s")] == [[3], [5]]


def test_a_run_that_has_just_begun_has_pages(tmp_path: Path, directory: Path) -> None:
    run = tmp_path / "new"
    run.mkdir()
    (run / "config.yaml").write_bytes((directory / "one" / "config.yaml").read_bytes())
    client = open_view(tmp_path)
    assert "killed" in text(client, "/")
    assert "No group of this step" in text(client, "/runs/new")
    reply = client.get("/runs/new/samples")
    assert reply.status_code == 503
    assert "has stored nothing yet" in reply.text


def test_a_live_run_shows_its_processes_and_what_they_wait_for(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = members.member("learner-0", waits_for="a <batch>", version=7)
    reply = members.reply([waiting], stalled="generator-0 does not answer")
    monkeypatch.setattr(status, "living_pid", lambda run_dir: 1)
    monkeypatch.setattr(library, "ask_status", lambda run_dir, timeout_s: reply)
    client = open_view(directory)
    page = text(client, "/runs/one")
    row = page[page.index("<td>learner-0</td>") :].split("</tr>")[0]
    assert "a &lt;batch&gt;" in row
    assert ">7<" in row
    assert "generator-0 does not answer" in page
    assert 'data-refresh="3"' in page
