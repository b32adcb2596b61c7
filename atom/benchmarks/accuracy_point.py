"""One point of the accuracy experiment: GSM8K's task put to one engine, all items.

Method. ``concurrency`` requests are open at once, at temperature 0, with drafts that are verified
for real, as lm-eval sends them (see ``gsm8k_task``). Under ``unpatched`` stale payloads are counted
by their tags and believed all the same, so that the fault reaches the answers; every other protocol
fails the request. The kernels' guard is on in all points: a row with an impossible count fails its
request instead of the process. Bulk stores on other streams ahead of steps raise the pressure.

``python -m atom.benchmarks.accuracy_point`` reads its job, one JSON line, from standard input and
ends itself when that closes. Exit codes: 0 fine, else see ``throughput_process``.
"""

from __future__ import annotations

import asyncio
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from atom.benchmarks.accuracy_clients import (
    Answer,
    Asker,
    EngineAsker,
    HttpAsker,
    ask_all,
    item_rows,
)
from atom.benchmarks.accuracy_engine import ObservedRunner
from atom.benchmarks.accuracy_settings import (
    AccuracyPoint,
    AccuracySettings,
    build_points,
    engine_settings,
)
from atom.benchmarks.gsm8k_task import TaskItem, hash_of, prompts_of_test
from atom.benchmarks.throughput_point import EXIT_CODES, first_line, is_out_of_memory
from atom.benchmarks.throughput_process import Tell, read_job, run_and_leave
from atom.benchmarks.throughput_rows import Outcome
from atom.config import DeviceChoice
from atom.device import Device, open_device
from atom.entrypoints.async_engine import AsyncEngine
from atom.entrypoints.tokenizer import ServerTokenizer, open_tokenizer
from atom.errors import DeviceError
from atom.model_engine.engine_builder import build_engine, load_model
from atom.model_engine.llm_engine import LLMEngine
from atom.models.weights import LoadedModel
from atom.transfer.copy_protocol import UnpatchedWarning

_LOGGER = logging.getLogger(__name__)
_TELL_SECONDS = 0.5
_STOP_SECONDS = 30.0
#: counters of an engine by name of ``AccuracyRow``
_COUNTERS = {
    "impossible_statuses": "impossible_statuses",
    "guard_errors": "guard_errors",
    "decode_steps": "decode_steps",
    "generated_tokens": "generated_tokens",
    "prompt_tokens_computed": "prompt_tokens",
    "hit_tokens": "hit_tokens",
    "drafted_tokens": "drafted_tokens",
    "accepted_tokens": "accepted_tokens",
}
_POOL_COUNTERS = {"stored_bytes": "offload_stored_bytes", "loaded_bytes": "offload_loaded_bytes"}

#: takes fields of ``AccuracyRow``, and the rows of the other tables
#: items and their chats
Task = tuple[Sequence[TaskItem], Sequence[Sequence[dict[str, str]]]]


def run_point(
    settings: AccuracySettings,
    point: AccuracyPoint,
    tell: Tell,
    *,
    model: str,
    began: float | None = None,
    loaded: LoadedModel | None = None,
    device: Device | None = None,
    task: Task | None = None,
    reference: Sequence[str] | None = None,
) -> Outcome:
    """Run one point in this process, and tell all that becomes known of it.

    Args:
        settings: of the sweep.
        point: which.
        tell: called with fields of the point's row as they are known, and at last with
            ``outcome``; also ``items_table`` and ``texts_table``, rows without identity.
        model: checkpoint folder with a tokenizer; unused for a server.
        began: when the point began, by ``time.time``; now by default.
        loaded: its weights, loaded already.
        device: already open.
        task: items and chats, made already.
        reference: answer hashes of the reference, by item, where they are known.

    Returns:
        How it ended. Whatever fails is an outcome, not an exception.
    """
    began = time.time() if began is None else began
    threads = torch.get_num_threads()
    outcome, detail = Outcome.START_FAILED, None
    try:
        task = task or prompts_of_test(settings)
        if point.protocol is None:
            answers = _ask_server(settings, task, tell, began)
            detail = next((answer.error for answer in answers if answer.error), None)
            if all(answer.error for answer in answers):
                # no answer at all is no score of 0
                raise DeviceError(f"the server answered no item: {detail}")
            outcome = Outcome.OK
        else:
            if settings.device is DeviceChoice.VIRTUAL:
                # matrices of a small model: more threads would wait for each other
                torch.set_num_threads(1)
            device = device or open_device(
                settings.device, profile=settings.device_profile, seed=settings.seed
            )
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UnpatchedWarning)
                engine = start_engine(settings, point, device, model, loaded)
            tokenizer = open_tokenizer(model, engine.vocab_size or 2)
            answers, outcome, detail = asyncio.run(
                _serve(settings, engine, tokenizer, task, tell, began)
            )
        _tell_answers(settings, point, task, answers, reference, tell)
    except Exception as error:
        _LOGGER.exception("the point failed")
        detail = f"{type(error).__name__}: {error}"
        if is_out_of_memory(error):
            outcome = Outcome.OUT_OF_MEMORY
    finally:
        torch.set_num_threads(threads)
    tell(
        {
            "outcome": outcome.value,
            "outcome_detail": None if detail is None else first_line(detail),
        }
    )
    return outcome


def start_engine(
    settings: AccuracySettings,
    point: AccuracyPoint,
    device: Device,
    model: str,
    loaded: LoadedModel | None = None,
) -> LLMEngine:
    """The engine of a point.

    Raises:
        BadInput: it does not fit, or there is no such model.
        DeviceOutOfMemory: the device or the host has not as much.
    """
    engine = engine_settings(settings, point)
    loaded = loaded or load_model(
        model,
        device,
        with_mtp=engine.draft_tokens > 0,
        seed=settings.seed,
        max_positions=engine.max_model_len + 4 * engine.query_tokens,
    )
    mtp = loaded.mtp if engine.draft_tokens else None
    built = build_engine(loaded.model, mtp, engine, device, runner_class=ObservedRunner)
    runner = built.runner
    assert isinstance(runner, ObservedRunner)
    runner.observe(believes=point.believes)
    runner.press(point.pressure_mib, point.pressure_every, settings.pressure_streams)
    return built


async def _serve(
    settings: AccuracySettings,
    engine: LLMEngine,
    tokenizer: ServerTokenizer,
    task: Task,
    tell: Tell,
    began: float,
) -> tuple[list[Answer], Outcome, str | None]:
    runner = engine.runner
    assert isinstance(runner, ObservedRunner)
    server = AsyncEngine(engine)
    server.start()
    asker = EngineAsker(
        server,
        tokenizer,
        engine.vocab_size or 2,
        engine.settings.max_model_len,
        settings.max_tokens,
    )
    tell({"setup_seconds": max(0.0, time.time() - began)})
    answers = await _watched(settings, asker, task, tell, lambda: _counts(server.stats(), runner))
    stopped = await server.stop(_STOP_SECONDS)
    # only a thread that has ended may be looked at
    tell(_counts(engine.stats() if stopped else server.stats(), runner))
    if server.failure is not None:
        full = is_out_of_memory(server.failure)
        return answers, Outcome.OUT_OF_MEMORY if full else Outcome.CRASH, server.failure
    if not stopped:
        return answers, Outcome.HANG, f"its engine did not stop within {_STOP_SECONDS:.0f} s"
    return answers, Outcome.OK, next((a.error for a in answers if a.error), None)


def _ask_server(settings: AccuracySettings, task: Task, tell: Tell, began: float) -> list[Answer]:
    assert settings.base_url is not None
    tell({"setup_seconds": max(0.0, time.time() - began)})
    if settings.client == "lm-eval":
        from atom.benchmarks.lm_eval_client import ask_by_lm_eval

        start = time.monotonic()
        answers = ask_by_lm_eval(settings)
        tell({"seconds": time.monotonic() - start})
        return answers

    async def ask() -> list[Answer]:
        asker = HttpAsker(
            settings.base_url or "",
            settings.server_model,
            settings.max_tokens,
            settings.request_seconds,
            settings.api_key_env,
        )
        try:
            return await _watched(settings, asker, task, tell, dict)
        finally:
            await asker.close()

    return asyncio.run(ask())


async def _watched(
    settings: AccuracySettings,
    asker: Asker,
    task: Task,
    tell: Tell,
    counts: Callable[[], dict[str, Any]],
) -> list[Answer]:
    """Ask all items, and tell the counters as they go."""
    start = time.monotonic()
    answers: dict[int, Answer] = {}
    asking = asyncio.create_task(ask_all(asker, task[1], settings.concurrency, answers))
    while not asking.done():
        await asyncio.wait({asking}, timeout=_TELL_SECONDS)
        seconds = time.monotonic() - start
        tell({"seconds": seconds, "answered": len(answers), **counts()})
        if seconds > settings.point_seconds:
            asking.cancel()
            await asyncio.wait({asking})
    if not asking.cancelled():
        asking.result()
    late = f"no answer within the {settings.point_seconds:g} s of its point"
    return [answers.get(number) or Answer(error=late) for number in range(len(task[1]))]


def _counts(stats: dict[str, float], runner: ObservedRunner) -> dict[str, int]:
    names = _COUNTERS | (_POOL_COUNTERS if "pool_bytes" in stats else {})
    return {ours: int(stats.get(name, 0)) for ours, name in names.items()} | runner.stale()


def _tell_answers(
    settings: AccuracySettings,
    point: AccuracyPoint,
    task: Task,
    answers: Sequence[Answer],
    reference: Sequence[str] | None,
    tell: Tell,
) -> None:
    rows = item_rows(*task, answers)
    failed = sum(row["outcome"] == "error" for row in rows)
    tell(
        {
            "answered": len(rows) - failed,
            "failed_requests": failed,
            "strict": sum(row["strict"] for row in rows),
            "flexible": sum(row["flexible"] for row in rows),
            "items_table": rows,
            "texts_table": _texts(settings, point, rows, answers, reference),
        }
    )


def _texts(
    settings: AccuracySettings,
    point: AccuracyPoint,
    rows: Sequence[dict[str, Any]],
    answers: Sequence[Answer],
    reference: Sequence[str] | None,
) -> list[dict[str, Any]]:
    """Texts to keep: all of the reference's; of others those that differ from it, or are wrong."""
    if settings.gsm8k is not None:
        return []
    kept = [row for row in rows if row["outcome"] == "ok"]
    if not point.is_reference:
        if reference is None:
            kept = [row for row in kept if not row["strict"]]
        else:
            kept = [row for row in kept if row["answer_hash"] != reference[row["item"]]]
        kept = kept[: settings.texts]
    return [{"item": row["item"], "text": answers[row["item"]].text} for row in kept]


def task_hash(task: Task) -> str:
    """Of all prompts."""
    return hash_of([list(chat) for chat in task[1]])


# -- a process of its own
def main() -> int:
    """Run the job that standard input describes. Returns the exit code."""
    job, tell = read_job()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    settings = AccuracySettings.parse(job["settings"], where="sweep accuracy")
    point = next(p for p in build_points(settings) if p.point_id == job["point_id"])
    outcome = run_point(
        settings,
        point,
        tell,
        model=job["model"],
        began=job["began"],
        reference=job.get("reference"),
    )
    return EXIT_CODES[outcome]


if __name__ == "__main__":
    run_and_leave(main)
