"""The units of FSDP: the modules of a model that are sharded and gathered separately."""

from collections.abc import Collection

from torch import nn


def units(
    model: nn.Module,
    *,
    blocks: Collection[str],
    min_params: int,
    kept: Collection[nn.Module | None],
) -> list[nn.Module]:
    """Return the modules inside the model that are sharded separately, inner ones first.

    With min_params=0 they are the modules whose class is named in blocks.  Otherwise they are the
    smallest modules with at least min_params parameters that are in no other unit; modules of
    `kept`, and modules that contain one, are never units.
    """
    if not min_params:
        return [module for module in model.modules() if type(module).__name__ in blocks]
    units: list[nn.Module] = []

    def visit(module: nn.Module) -> int:
        """Return the module's parameters that are in no unit."""
        left = sum(p.numel() for p in module.parameters(recurse=False))
        left += sum(visit(child) for child in module.children())
        # FSDP's hooks run with forward; a ModuleList has none.
        is_callable = type(module).forward is not nn.Module.forward
        has_kept = any(m in kept for m in module.modules())
        if left < min_params or module is model or has_kept or not is_callable:
            return left
        units.append(module)
        return 0

    visit(model)
    return units
