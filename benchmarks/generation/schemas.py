"""Try public JSON schemas as grammars of answers: how many are refused before anything starts, and
whether the answers of the others have exact log-probs and fit their schema.

Run: `python -m benchmarks.generation.schemas FOLDER... [--most N]`. A folder has files with one
schema each, as github.com/guidance-ai/jsonschemabench, or with a list of cases that have a `schema`
each, as github.com/json-schema-org/JSON-Schema-Test-Suite. Of each folder N schemas are drawn with
a fixed seed. A random model answers in vLLM; tokens that close a value are preferred, so that most
answers end. The log-probs are computed again by transformers, from the weights and the grammar.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import json
import random
import re
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import numpy as np
import torch
from referencing.exceptions import Unresolvable

from async_rl.batching.support import Grammars, compile_grammar, edits_of
from async_rl.core.calls import Support
from async_rl.core.errors import DataError
from async_rl.core.schemas import require_applied
from async_rl.core.types import Sampling, Score
from async_rl.data.tokenizer import load_tokenizer
from async_rl.generation.environment import prepare_environment
from async_rl.generation.opener import engine_opener
from async_rl.protocol.generator import Completion
from async_rl.rollouts.conversation import Written
from async_rl.rollouts.rollout import trajectory
from benchmarks.figures import figure
from benchmarks.generation.generation import parameters, settings
from benchmarks.generation.grammar_rate import speaking_model

LONGEST = 160
TOLERANCE = 1e-4
PROMPT = [20, 21, 22]
_CLOSERS = '"}]0,'
_PREFERENCE = 6.0


def schemas_in(folder: Path, most: int) -> list[Any]:
    """Return some of the schemas in the files of a folder and its subfolders."""
    files = sorted(folder.rglob("*.json"))
    random.Random(0).shuffle(files)
    found: list[Any] = []
    for file in files:
        content = json.loads(file.read_text())
        found += [case["schema"] for case in content] if isinstance(content, list) else [content]
        if len(found) >= most:
            break
    return [schema for schema in found[:most] if isinstance(schema, dict)]


def refusal(schema: Any, grammars: Grammars) -> str:
    """Return the kind of a refusal before the first group; empty if the schema is accepted."""
    support = Support(grammar=json.dumps(schema))
    try:
        compile_grammar(support)
    except DataError:
        return "refused: xgrammar does not compile it"
    try:
        require_applied(support)
    except DataError as error:
        path = str(error).removeprefix("the schema of the answer has ").partition("=")[0]
        return f"refused: {path.rpartition('/')[2]} is not applied"
    try:
        grammars.matcher(support, ())
    except DataError:
        return "refused: xgrammar does not compile it with tokens"
    return ""


class Bench:
    """An engine with a random model, and the same model of transformers."""

    def __init__(self, engine: Any, path: Path, tokenizer: Any) -> None:
        from transformers import AutoModelForCausalLM

        self._engine = engine
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype="float32").eval()
        self._tokenizer = tokenizer
        self._grammars = Grammars(
            tokenizer=str(path), vocab_size=self._model.config.get_text_config().vocab_size
        )
        closers = tokenizer.convert_tokens_to_ids(list(_CLOSERS))
        self._bias = dict.fromkeys(closers, _PREFERENCE)
        self.worst = 0.0

    async def outcome(self, name: str, schema: Any) -> str:
        """Return what became of one schema."""
        if why := refusal(schema, self._grammars):
            return why
        support = Support(grammar=json.dumps(schema), logit_bias=self._bias)
        sampling = Sampling(temperature=1.0, max_new_tokens=LONGEST, support=support)
        try:
            drawn = [done async for done in self._engine.generate(name, PROMPT, 1, sampling)]
        except DataError as error:
            print(f"failed: {error}: {json.dumps(schema)[:300]}")
            return "accepted, then failed"
        difference = self._difference(drawn[0])
        self.worst = max(self.worst, difference)
        if difference > TOLERANCE:
            return "accepted, log-probs are wrong"
        if drawn[0].is_truncated:
            return "accepted, exact, cut by the length"
        text = self._tokenizer.decode(drawn[0].token_ids, skip_special_tokens=True)
        try:
            jsonschema.validate(json.loads(text), schema)
        except jsonschema.ValidationError as error:
            print(f"misfit: {text}: {error.message[:200]}: {json.dumps(schema)[:300]}")
            return "accepted, exact, does not fit"
        except (jsonschema.SchemaError, Unresolvable, re.error) as error:
            print(f"not validated: {error!r:.200}")
            return "accepted, exact, not validated"
        return "accepted, exact, fits"

    @torch.no_grad()
    def _difference(self, done: Completion) -> float:
        prompt: Any = SimpleNamespace(token_ids=np.array(PROMPT, np.int32))
        score = Score(reward=0.0, parts={}, verdicts=(), latency_s=0.0)
        sample = trajectory(prompt, Written(tokens=done, answer="", transcript=""), score)
        edits, _ = edits_of([sample], self._grammars, temperature=1.0, device=torch.device("cpu"))
        ids = torch.tensor(sample.token_ids.tolist())[None]
        table = self._model(ids).logits[0, len(PROMPT) - 1 : -1].float()
        if edits is not None:
            edits.apply(table, slice(None))
        own = table.log_softmax(-1)[torch.arange(len(table)), torch.tensor(done.token_ids.tolist())]
        return float(np.abs(own.numpy() - done.logprobs).max())


async def play(folders: list[Path], most: int, path: Path) -> None:
    """Try the schemas of each folder and print the counts."""
    from async_rl.weights.block import SharedTensors
    from async_rl.weights.tensors import tensor_spec

    # An agent's requests have grammars that no setting names.
    config = settings(path, "rollout.fn=external", "generation.vllm.enforce_eager=true")
    engine = await engine_opener(config, path)()
    tensors = parameters(path)
    publisher = SharedTensors([tensor_spec(name, tensor) for name, tensor in tensors.items()])
    await engine.load_weights(publisher.write(0, tensors.values()))
    bench = Bench(engine, path, load_tokenizer(config, path))
    for folder in folders:
        counts = collections.Counter[str]()
        for number, schema in enumerate(schemas_in(folder, most)):
            counts[await bench.outcome(f"{folder}-{number}", schema)] += 1
        for name, count in sorted(counts.items()):
            figure(f"{folder.name}: {name}", count, "schemas")
    figure("largest difference of a log-prob", bench.worst, "nats", goal="below 1e-4")
    await engine.close()
    publisher.close()


def main() -> None:
    """Try the schemas of the folders."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--most", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        path = speaking_model(Path(directory))
        prepare_environment(settings(path), [])
        asyncio.run(play(options.folders, options.most, path))


if __name__ == "__main__":
    main()
