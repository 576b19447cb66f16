"""Which method of the buffer's service answers which message."""

from __future__ import annotations

from collections.abc import Mapping

from async_rl.buffer.service import BufferService
from async_rl.protocol.base import Message
from async_rl.protocol.buffer import FailGroup, PutGroup, ReleaseGenerator, RequestWork
from async_rl.protocol.learner import (
    CommitStep,
    DropBatch,
    ForgetBefore,
    FromLearner,
    GetEvaluationScores,
    GetHistory,
    KeepAdvantages,
    ReadSequences,
    SecureStore,
    StartEvaluation,
    SyncVersion,
    TakeBatch,
)
from async_rl.wire.rpc import Handler


def handlers_of(service: BufferService) -> Mapping[type[Message], Handler]:
    """Return the handler of each message; requests of earlier lives of the learner are refused."""

    def fenced(handler: Handler) -> Handler:
        async def answer(request: FromLearner) -> Message:
            service.state.lives.check(request.life)
            return await handler(request)

        return answer

    return {
        RequestWork: service.request_work,
        PutGroup: service.put_group,
        FailGroup: service.fail_group,
        ReleaseGenerator: service.release_generator,
        GetHistory: service.history,
        SyncVersion: service.sync_version,
        GetEvaluationScores: service.evaluation_scores,
        TakeBatch: fenced(service.take_batch),
        ReadSequences: fenced(service.read_sequences),
        DropBatch: fenced(service.drop_batch),
        SecureStore: fenced(service.secure_store),
        CommitStep: fenced(service.commit_step),
        StartEvaluation: fenced(service.start_evaluation),
        ForgetBefore: fenced(service.forget_before),
        KeepAdvantages: fenced(service.keep_advantages),
    }
