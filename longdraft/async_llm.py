"""The API for asyncio: one thread owns an ``LLM`` and decodes all requests together; callers await what it sends.

caller's event loop                          engine thread
encode in a worker thread
job ── thread-safe queue ──────────────────▶ submit
                                             step, step, ...
asyncio.Queue of the job ◀── outputs, call_soon_threadsafe, once per loop and turn
job.dropped ── same queue ─────────────────▶ abort before the next step
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
import traceback
import weakref
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from os import PathLike
from queue import Empty, SimpleQueue
from typing import Any

import torch

from longdraft.config import DEFAULT_DRAFT
from longdraft.errors import InvalidValueError, LongDraftError
from longdraft.llm import LLM, Message
from longdraft.llm_draft import SAME, Draft, Same
from longdraft.outputs import RequestOutput, StreamOutput
from longdraft.prompts import EncodedPrompt, Prompt, encode, one_each
from longdraft.request import Request
from longdraft.sampling_params import SamplingParams

EXIT_SECONDS = 10.0  # how long the end of the program waits for a step that is under way
log = logging.getLogger("longdraft")


class _Failure:
    """An error on its way to a caller. Several callers may get the same one."""

    def __init__(self, error: BaseException) -> None:
        # Raising lengthens the error's traceback: each caller starts from the one it had here.
        self._error, self._traceback = error, error.__traceback__

    def throw(self) -> None:
        raise self._error.with_traceback(self._traceback)


class _End:
    """Nothing more comes."""


@dataclass(eq=False)
class _Job:
    """One request on its way between a caller and the engine thread.

    The caller's side writes ``dropped``, the engine thread ``request``; ``arrived`` is touched in ``loop`` alone.
    """

    prompt: EncodedPrompt
    params: SamplingParams
    streamed: bool
    draft: Draft | Same = SAME
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    arrived: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    dropped: bool = False  # nobody waits for it any more
    request: Request | None = None

    async def next(self) -> Any:  # noqa: ANN401 - StreamOutput, RequestOutput or _End
        """What comes next; raises it if it is an error."""
        item = await self.arrived.get()
        if isinstance(item, _Failure):
            item.throw()
        return item


class _EngineThread:
    """Owns an ``LLM``: alone calls ``submit``, ``step`` and ``abort``, all in its own thread.

    A command is a job to look at (new or dropped), or ``None`` to stop.
    """

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._commands: SimpleQueue[_Job | None] = SimpleQueue()  # unlike Queue it may be filled from ``__del__``
        self._jobs: dict[_Job, None] = {}  # in the engine, in order of arrival
        self._outbox: dict[asyncio.AbstractEventLoop, list[tuple[_Job, object]]] = defaultdict(list)
        self._over = False  # set before the last commands are answered, so that no caller can slip in unheard
        self._crash: BaseException | None = None
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, name="longdraft-engine", daemon=True)
        self._thread.start()
        _running.add(self)

    def put(self, job: _Job) -> None:
        """Hand over a new job; raises if nobody will run it."""
        self._commands.put(job)
        self.check()  # after the put: what came too late for the thread's last look is refused here

    def drop(self, job: _Job) -> None:
        """Let a job go, wherever it is: one that is not in the engine yet never gets there."""
        job.dropped = True
        self._commands.put(job)

    def stop(self) -> None:
        """Ask the thread to end."""
        self._commands.put(None)

    def join(self, seconds: float | None = None) -> None:
        """Wait until it has."""
        self._thread.join(seconds)

    def check(self) -> None:
        """Raise unless the thread serves requests."""
        if self._over or not self._thread.is_alive():  # a forked process has the object without the thread
            raise self._error()

    def _error(self) -> LongDraftError:
        if self._over and self._crash is None:
            return InvalidValueError("AsyncLLM", "closed", "it must be open to take requests", "Make a new one.")
        cause = "this process was forked from the one that made it" if self._crash is None else repr(self._crash)
        error = LongDraftError(f"The engine thread of this AsyncLLM has ended ({cause}). Make a new one.")
        error.__cause__ = self._crash
        return error

    # --- in the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._settle_in()
            while self._attend():
                self._step()
        except BaseException as error:  # no bug and no SystemExit of a logits processor may leave callers waiting
            log.critical("The engine thread ends on an error.", exc_info=error)
            traceback.clear_frames(error.__traceback__)
            self._crash = error
        finally:
            self._over = True
            self._abandon()

    def _settle_in(self) -> None:
        """What torch keeps per thread: set as it was for the thread that made the model, or results could differ."""
        torch.set_num_threads(self._num_threads)
        device = self._llm.engine.store.k.device
        if device.type == "cuda":
            torch.cuda.set_device(device)

    def _attend(self) -> bool:
        """Do what was asked for since the last step, and wait where there is nothing to step; false to stop."""
        while True:
            self._flush()
            try:
                job = self._commands.get(block=not self._jobs)
            except Empty:
                return True
            if job is None:
                return False
            self._look_at(job)

    def _look_at(self, job: _Job) -> None:
        if job.dropped:
            self._end(job)
            return
        sink = partial(self._post, job) if job.streamed else None
        try:
            job.request = self._llm.submit(job.prompt, job.params, sink, job.draft)
        except BaseException as error:  # the job is nowhere but here: whatever happens, its caller must hear of it
            self._post(job, _Failure(error))
        else:
            self._jobs[job] = None

    def _step(self) -> None:
        try:
            outputs = self._llm.step()
        except Exception as error:
            self._fail(error)
            return
        if any(output.finish_reason for output in outputs):
            for job in [job for job in self._jobs if job.request.done]:
                self._finish(job)

    def _finish(self, job: _Job) -> None:
        del self._jobs[job]
        try:
            self._post(job, _End() if job.streamed else job.request.result())
        except BaseException as error:  # such as a tokenizer that cannot decode: this caller's business alone
            self._post(job, _Failure(error))

    def _fail(self, error: Exception) -> None:
        """A step broke: its batch is of unknown state, so all that are in the engine end; later ones start afresh."""
        log.error("A step failed; the %d requests in flight end with its error.", len(self._jobs), exc_info=error)
        traceback.clear_frames(error.__traceback__)  # callers may keep it, and its frames hold the step's tensors
        for job in list(self._jobs):
            self._end(job, _Failure(error))

    def _end(self, job: _Job, last: _Failure | None = None) -> None:
        """Take a job out of the engine, if it is there, and send its caller the last thing."""
        if job in self._jobs:
            del self._jobs[job]
            job.request.sink = None  # it hears of the end from here
            try:
                self._llm.abort(job.request)
            except BaseException as error:  # the others must still hear of their ends
                log.error("A request could not be aborted.", exc_info=error)
        if last:
            self._post(job, last)

    def _abandon(self) -> None:
        """End all there is, in the engine and in the queue."""
        failure = _Failure(self._error())
        for job in list(self._jobs):
            self._end(job, failure)
        while not self._commands.empty():
            job = self._commands.get()
            if job and not job.dropped:
                self._post(job, failure)
        self._flush()

    def _post(self, job: _Job, item: object) -> None:
        self._outbox[job.loop].append((job, item))

    def _flush(self) -> None:
        """Send what has come together, waking each event loop once."""
        outbox, self._outbox = self._outbox, defaultdict(list)
        for loop, items in outbox.items():
            try:
                loop.call_soon_threadsafe(_deliver, items)
            except RuntimeError:  # the loop is closed, and its callers are gone
                for job, _ in items:
                    self.drop(job)


def _deliver(items: list[tuple[_Job, object]]) -> None:
    for job, item in items:
        job.arrived.put_nowait(item)


_running: weakref.WeakSet[_EngineThread] = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    """At the end of the program: a daemon thread that is killed inside torch can take the process down with it."""
    threads = list(_running)
    for thread in threads:
        thread.stop()
    for thread in threads:
        thread.join(EXIT_SECONDS)


class AsyncLLM:
    """An ``LLM`` for asyncio: concurrent calls are decoded together, from any number of event loops and threads.

    Takes the arguments of ``LLM``. Loading blocks; ``await asyncio.to_thread(AsyncLLM, model)`` does not. Outputs are
    those of ``LLM``; requests without a seed get theirs in the order in which they reach the engine.

    A caller that is cancelled, or a stream that is closed or dropped, ends its request and frees its cache before the
    next step. If a step fails, every request in flight raises its error, and later ones are served.

    ``llm`` may be read (tokenizer, ``default_sampling_params``, ``engine.stats``) but not used until this is closed.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        draft: Draft = DEFAULT_DRAFT,
        **settings: Any,  # noqa: ANN401 - those of LLM
    ) -> None:
        self._own(LLM(model, draft, **settings))

    @classmethod
    def of(cls, llm: LLM) -> AsyncLLM:
        """Take over an ``LLM`` that has nothing to do. It can be used directly again after ``close``."""
        if not isinstance(llm, LLM):
            raise InvalidValueError("llm", llm, "must be an LLM")
        if llm.engine.num_unfinished:
            raise InvalidValueError("unfinished requests of the LLM", llm.engine.num_unfinished, "there must be none")
        self = cls.__new__(cls)
        self._own(llm)
        return self

    def _own(self, llm: LLM) -> None:
        self.llm = llm
        self._thread = _EngineThread(llm)

    def __repr__(self) -> str:
        return f"Async{self.llm!r}"

    async def agenerate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, draft: Draft | Same = SAME
    ) -> RequestOutput:
        """Complete one prompt: text, token ids, or a mapping with ``prompt`` or ``prompt_token_ids``.

        Without ``sampling_params`` they are ``llm.default_sampling_params``; ``draft``: as in ``LLM.generate``. Raises
        ``InvalidValueError`` or ``ContextLengthError`` for what is unusable, and ``InvalidValueError`` when closed,
        before or meanwhile.
        """
        return await self._result(self._encode, prompt, sampling_params, draft)

    async def achat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, draft: Draft | Same = SAME
    ) -> RequestOutput:
        """Answer one conversation: a list of messages with ``role`` and ``content``. Raises ``TemplateError``, too."""
        return await self._result(self._encode_chat, messages, sampling_params, draft)

    def astream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, draft: Draft | Same = SAME
    ) -> AsyncStream:
        """Complete one prompt and give its text as it comes. It starts, and is checked, when it is first read."""
        return AsyncStream(partial(self._prepare, self._encode, prompt, sampling_params, draft, True), self._thread)

    def astream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, draft: Draft | Same = SAME
    ) -> AsyncStream:
        """Answer one conversation as ``astream`` does."""
        return AsyncStream(
            partial(self._prepare, self._encode_chat, messages, sampling_params, draft, True), self._thread
        )

    async def close(self) -> None:
        """End what is in flight (its callers get ``InvalidValueError``) and the thread. Closing again is fine."""
        self._thread.stop()
        await asyncio.to_thread(self._thread.join)

    async def __aenter__(self) -> AsyncLLM:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def __del__(self) -> None:
        if hasattr(self, "_thread"):  # the model was loaded
            self._thread.stop()  # no join: this may run in that very thread

    def _encode(self, prompt: Prompt) -> EncodedPrompt:
        return encode(prompt, self.llm.tokenizer)

    def _encode_chat(self, messages: Sequence[Message]) -> EncodedPrompt:
        return EncodedPrompt(self.llm.encode_chat(messages))

    async def _prepare(
        self,
        encoder: Callable[[Any], EncodedPrompt],
        source: object,
        params: SamplingParams | None,
        draft: Draft | Same,
        streamed: bool,
    ) -> _Job:
        self._thread.check()
        (params,) = one_each(params, 1, self.llm.default_sampling_params)
        prompt = await asyncio.to_thread(encoder, source)  # a long text takes seconds
        return _Job(prompt, params, streamed, draft)

    async def _result(
        self,
        encoder: Callable[[Any], EncodedPrompt],
        source: object,
        params: SamplingParams | None,
        draft: Draft | Same,
    ) -> RequestOutput:
        job = await self._prepare(encoder, source, params, draft, False)
        self._thread.put(job)
        try:
            return await job.next()
        except BaseException:  # cancelled, failed, or left behind by its event loop
            self._thread.drop(job)
            raise


class AsyncStream(AsyncIterator[StreamOutput]):
    """The outputs of one request as they come.

    Closing it, leaving its ``async with`` block, cancelling a read, or dropping it ends the request. A slow reader
    holds up nobody: outputs wait for it.
    """

    def __init__(self, prepare: Callable[[], Awaitable[_Job]], thread: _EngineThread) -> None:
        self._prepare, self._thread = prepare, thread
        self._job: _Job | None = None
        self._reading = self._ended = False

    async def __anext__(self) -> StreamOutput:
        if self._reading:
            raise RuntimeError("This stream is being read by another task.")
        if self._ended:
            raise StopAsyncIteration
        self._reading = True
        try:
            if self._job is None:
                job = await self._prepare()
                if self._ended:  # closed meanwhile
                    raise StopAsyncIteration
                self._thread.put(job)
                self._job = job
            output = await self._job.next()
        except BaseException:  # cancelled, failed, or left behind by its event loop
            self._close()
            raise
        finally:
            self._reading = False
        if self._ended or isinstance(output, _End):
            self._ended = True
            raise StopAsyncIteration
        return output

    async def aclose(self) -> None:
        """End the request now; what has not been read is lost, and a read under way ends."""
        self._close()
        if self._reading and self._job:
            self._job.loop.call_soon_threadsafe(self._job.arrived.put_nowait, _End())

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def __del__(self) -> None:
        self._close()

    def _close(self) -> None:
        if self._job and not self._ended:
            self._thread.drop(self._job)
        self._ended = True
