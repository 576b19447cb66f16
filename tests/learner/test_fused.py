from __future__ import annotations

from pathlib import Path

import torch
from learner_support import make_groups

from async_rl.batching.batch import collate
from async_rl.batching.packing import pack
from async_rl.learner.fused import FusedAttention, FusedRMSNorm
from async_rl.learner.loading import load_policy


def test_fused_modules_compute_what_the_plain_ones_do(model_path: Path) -> None:
    device = torch.device("cpu")
    batch = collate(make_groups(), device=device)
    row = pack(batch, range(batch.num_sequences), device=device)
    results = []
    for is_fused in (True, False):
        policy = load_policy(model_path, trust_remote_code=False, is_fused=is_fused)
        with torch.no_grad():
            for name, parameter in policy.lm.named_parameters():
                if "norm" in name:
                    parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()))
        logprobs = policy(row, temperature=1.0, chunk_tokens=64).logprobs
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        assert is_fused == any(isinstance(m, FusedAttention) for m in policy.modules())
        assert is_fused == any(isinstance(m, FusedRMSNorm) for m in policy.modules())
        results.append((logprobs, {name: p.grad for name, p in policy.lm.named_parameters()}))
    (fused, fused_grads), (plain, plain_grads) = results
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)
    assert fused_grads.keys() == plain_grads.keys()
    for name, grad in plain_grads.items():
        torch.testing.assert_close(fused_grads[name], grad, rtol=1e-4, atol=1e-5, msg=name)
