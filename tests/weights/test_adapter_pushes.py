"""Generators that read files get the adapter and have every bit of the learner's weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from test_changes import Generator, push
from test_files import sender

from async_rl.core.errors import WeightsError
from async_rl.protocol.weights import Manifest
from async_rl.weights.adapters import Adapter, merge
from async_rl.weights.block import SharedTensors, tensor_spec
from async_rl.weights.files import FileReader

SHAPES = {
    "embed.weight": (30, 8),
    "a.q.weight": (70, 40),
    "a.q.bias": (70,),
    "b.up.weight": (9, 70),
}
ADAPTED = ("a.q", "b.up")


def matrices(rows: int, rank: int, columns: int, seed: int = 0) -> list[torch.Tensor]:
    """W, B and A with numbers of very different sizes, zeros and a column of zeros."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((rows, columns), (rows, rank), (rank, columns))
    found = [
        torch.randn(size, generator=generator)
        * torch.exp(5 * torch.randn(size, generator=generator))
        for size in sizes
    ]
    found[1][0] = 0
    found[2][:, 1] = 0
    return found


@pytest.mark.parametrize("rank", [1, 16, 512])
def test_a_merged_weight_has_the_same_bits_in_every_order_of_the_sums(
    rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight, up, down = matrices(130, rank, 90)
    merged = merge(weight, up, down, 32 / 3)
    order = torch.randperm(rank, generator=torch.Generator().manual_seed(1))
    assert torch.equal(merge(weight, up[:, order], down[order], 32 / 3), merged)
    parts = [merge(w, u, down, 32 / 3) for w, u in zip(weight.split(41), up.split(41), strict=True)]
    assert torch.equal(torch.cat(parts), merged)
    monkeypatch.setattr("async_rl.weights.adapters._PIECE", 1000)
    assert torch.equal(merge(weight, up, down, 32 / 3), merged)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_merges_to_the_bits_of_a_cpu() -> None:
    matrices_of = matrices(130, 16, 90)
    on_gpu = merge(*(x.cuda() for x in matrices_of), 32 / 3)
    assert torch.equal(on_gpu.cpu(), merge(*matrices_of, 32 / 3))


@pytest.mark.parametrize("rank", [1, 16, 512])
def test_a_merged_weight_is_the_exact_one_to_a_few_roundings(rank: int) -> None:
    weight, up, down = matrices(130, rank, 90)
    exact = weight.double() + 2.0 * (up.double() @ down.double())
    largest = up.abs().amax(1, keepdim=True) * down.abs().amax(0, keepdim=True)
    allowed = 2**-24 * exact.abs() + 2.0 * rank * 2**-21 * largest
    assert ((merge(weight, up, down, 2.0) - exact).abs() <= allowed).all()
    assert torch.equal(merge(weight, torch.zeros_like(up), down, 2.0), weight)


@pytest.mark.parametrize("rank", [16, 512])
def test_the_sums_of_a_product_are_exact(rank: int) -> None:
    """The second half of the terms is the negative of the first half: a rounding of any sum in
    between would leave a remainder.
    """
    generator = torch.Generator().manual_seed(0)
    up = 0.5 + 0.5 * torch.rand(60, rank // 2, generator=generator)
    down = 0.5 + 0.5 * torch.rand(rank // 2, 50, generator=generator)
    terms = torch.cat([up, -up], 1), torch.cat([down, down])
    assert not merge(torch.zeros(60, 50), *terms, 1.0).any()


class Learner:
    """Base weights, and an adapter that each version changes. place: the directory of the base."""

    def __init__(self, place: Path, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)
        self.base = {n: torch.randn(s, generator=generator) for n, s in SHAPES.items()}
        place.mkdir()
        names = list(self.base)
        # Two files, as large models have.
        save_file({n: self.base[n] for n in names[:2]}, place / "model-1.safetensors")
        save_file({n: self.base[n] for n in names[2:]}, place / "model-2.safetensors")
        self.dtype = dtype
        self.files = sender(str(place.parent / "pushes"))
        specs = [tensor_spec(name, tensor.to(dtype)) for name, tensor in self.base.items()]
        self.publisher = SharedTensors(specs)
        self.tensors: list[torch.Tensor] = []

    def publish(self, version: int) -> Manifest:
        """Write the merged weights of a version, as the ranks do."""
        generator = torch.Generator().manual_seed(version)
        pairs = {}
        for layer in ADAPTED:
            rows, columns = SHAPES[f"{layer}.weight"]
            pairs[f"base_model.model.{layer}.lora_A.weight"] = torch.randn(
                4, columns, generator=generator
            )
            pairs[f"base_model.model.{layer}.lora_B.weight"] = 0.01 * torch.randn(
                rows, 4, generator=generator
            )
        adapter = Adapter(tensors=pairs, scaling=2.0)
        self.files._learner.exporter.adapter = adapter  # type: ignore[misc]
        self.tensors = []
        for name, weight in self.base.items():
            if name.removesuffix(".weight") in ADAPTED:
                layer = f"base_model.model.{name.removesuffix('.weight')}"
                up, down = (pairs[f"{layer}.lora_{side}.weight"] for side in "BA")
                weight = merge(weight, up, down, 2.0)
            self.tensors.append(weight.to(self.dtype))
        return self.publisher.write(version, self.tensors)

    async def run(self, versions: Sequence[Sequence[Generator]]) -> None:
        """Push one version after the other, each to these generators, and compare every bit."""
        for version, generators in enumerate(versions):
            manifest = self.publish(version)
            await push(manifest, self.files, *generators)
            for generator in generators:
                assert has(generator, self.tensors), (version, generator.member.name)


def has(generator: Generator, tensors: Sequence[torch.Tensor]) -> bool:
    return generator.has([tensor.view(torch.int16) for tensor in tensors])


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def learner(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Learner]:
    with (made := Learner(tmp_path / "model", request.param)).publisher:
        yield made
        made.files.close()


def reader(name: str, place: Path) -> Generator:
    generator = Generator(name)
    generator.files = FileReader(place)
    return generator


def forms(generator: Generator) -> list[str]:
    """What each load was asked to read."""
    return [
        "adapter" if scaling else "all" if base is None else "changes"
        for scaling, base in zip(generator.scalings, generator.bases, strict=True)
    ]


async def test_each_push_is_an_adapter_also_for_a_late_joiner_and_after_a_gap(
    learner: Learner, tmp_path: Path
) -> None:
    early, gap, late = (reader(name, tmp_path / "model") for name in ("early", "gap", "late"))
    with early.files, gap.files, late.files:
        await learner.run([(early, gap), (early,), (early, gap, late), (early, gap, late)])
    assert [forms(g) for g in (early, gap, late)] == [["adapter"] * n for n in (4, 3, 2)]


async def test_a_push_has_the_bytes_of_the_adapter(learner: Learner, tmp_path: Path) -> None:
    early = reader("early", tmp_path / "model")
    with early.files:
        await learner.run([(early,)])
    [file] = (tmp_path / "pushes").iterdir()
    tensors = load_file(file)
    assert sum(t.numel() for t in tensors.values()) == 4 * (70 + 40 + 9 + 70)


async def test_weights_without_a_product_are_read_once(
    learner: Learner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = reader("early", tmp_path / "model")
    read: list[str] = []
    base = generator.files._base
    original = base._read

    def noted(name: str) -> torch.Tensor:
        read.append(name)
        return original(name)

    monkeypatch.setattr(base, "_read", noted)
    with generator.files:
        await learner.run([(generator,)] * 3)
    assert read == [*SHAPES, *["a.q.weight", "b.up.weight"] * 2]


def bend(place: Path) -> None:
    tensors = load_file(place / "model-1.safetensors")
    tensors["embed.weight"][3, 3] += 1
    save_file(tensors, place / "model-1.safetensors")


def reshape(place: Path) -> None:
    tensors = load_file(place / "model-2.safetensors")
    tensors["a.q.bias"] = tensors["a.q.bias"][:-1].clone()
    save_file(tensors, place / "model-2.safetensors")


def cut(place: Path) -> None:
    path = place / "model-1.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


@pytest.mark.parametrize(
    "fault", [bend, reshape, cut, lambda place: (place / "model-2.safetensors").unlink()]
)
async def test_a_generator_with_another_base_gets_all_weights_and_the_others_adapters(
    fault: Callable[[Path], None], learner: Learner, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in (tmp_path / "model").iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    fault(other)
    whole, broken = reader("whole", tmp_path / "model"), reader("broken", other)
    with whole.files, broken.files:
        await learner.run([(whole, broken)] * 3)
    assert forms(whole) == ["adapter"] * 3
    # Its directory is not tried again.
    assert forms(broken)[:2] == ["adapter", "all"]
    assert "adapter" not in forms(broken)[2:]


async def test_all_weights_replace_a_damaged_adapter(learner: Learner, tmp_path: Path) -> None:
    generator = reader("early", tmp_path / "model")
    with generator.files:
        await learner.run([(generator,)])
        manifest = learner.publish(1)
        stored = learner.files._write_adapter(manifest, (), learner.files._learner.exporter.adapter)
        path = Path(stored.url.removeprefix("file://"))
        for content in (path.read_bytes()[:-9], path.read_bytes()[:-1] + b"\x77", b""):
            path.write_bytes(content)
            with pytest.raises(WeightsError):
                generator.files.fetch(stored, manifest)
        found = generator.files.fetch(learner.files.write(manifest), manifest)
        generator.manifest = found
        assert has(generator, learner.tensors)
        await learner.run([(), (), (generator,)])


def test_an_adapter_that_another_manifest_announced_is_refused(
    learner: Learner, tmp_path: Path
) -> None:
    generator = reader("early", tmp_path / "model")
    with generator.files:
        stored = learner.files._write_adapter(
            learner.publish(0), (), learner.files._learner.exporter.adapter
        )
        announced = learner.publish(1)
        with pytest.raises(WeightsError, match=r"checksum of .* announced"):
            generator.files.fetch(stored, replace(announced))
