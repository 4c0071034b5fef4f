"""The offline API: prompts in, results out; loops ``Engine.step``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import torch
from tqdm import tqdm

from longdraft.checkpoint.chat import encode_chat
from longdraft.checkpoint.load import fitting, load_checkpoint
from longdraft.checkpoint.tokenizer_folder import read_tokenizer
from longdraft.config import DEFAULT_DRAFT, AutoDraft, DraftConfig
from longdraft.core import Status, StepOutput
from longdraft.engine.engine import Engine
from longdraft.errors import InvalidValueError, ModelFileError
from longdraft.exactness import label, tier
from longdraft.kernels.dispatch import explain
from longdraft.llm_build import Wanted, build
from longdraft.llm_control import exact_only
from longdraft.llm_draft import SAME, Draft, Same, resolve_draft, settled
from longdraft.outputs import RequestOutput
from longdraft.prompts import EncodedPrompt, Prompt, as_list, encode, one_each, require
from longdraft.request import Request, Sink, Stream
from longdraft.sampling_params import SamplingParams, from_generation_config

Message = Mapping[str, Any]
OnStep = Callable[[Engine, list[StepOutput]], None]
log = logging.getLogger("longdraft")


class LLM:
    """A model ready to generate. One thread may use it at a time.

    Args:
        model: folder, GGUF file, hub id, or ``None`` for the embedded SmolLM2-135M-Instruct.
        draft: what proposes tokens: a ``DraftConfig``, a name (``"streaming_llm"``, ``"snapkv"``, ``"verified"``,
            ``"pages"``, ``"topk"``, ``"full"``, ``"full+quant8"``, ``"layer_skip"``, ``"int8"``, ``"ngram"``), a small
            model's or a SPIRe draft's path, a mapping of ``DraftConfig``'s fields, ``"auto"`` (draft and number of
            tokens are chosen anew at every step, by what they are predicted to gain; ``"auto+PATH"``: a SPIRe draft may
            be chosen, too), ``None`` for plain decoding, or ``"default"``: ``"auto"`` where kernels give the same bits
            whatever is chosen (the native ones, and float64), else none.
            It never changes an output. A call may name another one for its requests.
        dtype: type weights are stored and multiplied in: float32, bfloat16, float64 (float16 becomes bfloat16), or
            auto: bfloat16 where the native kernels run, else float32.
        kv_dtype: type K and V are stored in; ``None`` is ``dtype``.
        kv_format: format that all but the newest K and V are kept in: ``"quant8"``, 8 bits with scales. **Lossy**: more
            tokens fit, and outputs are those of a slightly different model; drafts change nothing relative to that.
        device: auto, cpu or cuda.
        max_model_len: longest prompt + output in tokens; ``None`` is the model's own limit.
        max_num_seqs: most requests in flight at once; the rest wait.
        max_num_batched_tokens: prompt tokens per prefill step.
        kv_cache_memory_bytes: size of the KV cache; ``None`` is 40 % of the memory that the weights leave free.
        block_size: tokens per KV page.
        seed: what the seeds of unseeded requests are drawn from.
        generation_config: ``auto`` takes ``default_sampling_params`` from the model's generation_config.json, ``none``
            takes the library's own.
        tokenizer: folder with another ``tokenizer.json``; ``None`` is the model's own.
        download: allow the network for a hub id that is not cached.
        on_load: called as ``on_load(layers_done, layers)`` while weights are read.

    Raises ``ModelNotFoundError``, ``ModelFileError``, ``UnsupportedModelError``, ``VocabularyMismatchError``,
    ``TargetMismatchError``, ``InvalidValueError`` or ``OutOfMemoryError``.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        draft: Draft = DEFAULT_DRAFT,
        *,
        dtype: str | torch.dtype = "auto",
        kv_dtype: str | torch.dtype | None = None,
        kv_format: str | None = None,
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 512,
        kv_cache_memory_bytes: int | None = None,
        block_size: int = 16,
        seed: int = 0,
        generation_config: str = "auto",
        tokenizer: str | PathLike[str] | None = None,
        download: bool = False,
        on_load: Callable[[int, int], None] | None = None,
    ) -> None:
        self.checkpoint = load_checkpoint(model, download=download)
        self.tokenizer = self.checkpoint.tokenizer
        if tokenizer is not None:
            self.tokenizer = fitting(read_tokenizer(tokenizer), self.checkpoint.config, tokenizer)
        wanted = Wanted(
            draft=draft,
            dtype=dtype,
            kv_dtype=kv_dtype,
            kv_format=kv_format,
            device=device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            block_size=block_size,
            seed=seed,
            download=download,
        )
        built = build(replace(self.checkpoint, tokenizer=self.tokenizer), wanted, on_load)
        self.kv_format, self.model, self.engine = kv_format, built.engine.model, built.engine
        self.draft, self._own = built.draft, built.own
        self.default_sampling_params = self._defaults(generation_config)
        self._requests: dict[int, Request] = {}  # unfinished ones, by the ids of their sequences
        self._log_surprises(dtype)

    def __repr__(self) -> str:
        config, lossy = self.engine.config, f", kv_format={self.kv_format!r}, lossy" if self.kv_format else ""
        return (
            f"LLM({self.checkpoint.name!r}, dtype={self.model.dtype}, device={str(self.model.device)!r}, "
            f"max_model_len={config.max_model_len}, kv_tokens={config.kv_tokens}{lossy})"
        )

    @property
    def exactness(self) -> str:
        """The tier of the promise that a draft changes nothing, or ``lossy`` with a ``kv_format``: docs/lossless.md."""
        return label(self.model, self.tier)

    @property
    def tier(self) -> str:
        """The tier of that promise on these kernels, relative to this target."""
        return tier(self.model, self.draft)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        draft: Draft | Same = SAME,
        use_tqdm: bool = True,
        on_step: OnStep | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; results come in the order of the prompts.

        A prompt is text, token ids, or a mapping with ``prompt`` or ``prompt_token_ids``. ``sampling_params`` is one
        for all or one per prompt; ``None`` is ``default_sampling_params``. ``draft`` may name another
        one for these prompts (no small model that was not loaded with the LLM). ``use_tqdm`` shows progress on a
        terminal.
        ``on_step(engine, outputs)`` is called after every step; it may abort requests.

        Raises ``InvalidValueError`` or ``ContextLengthError`` before anything is computed if any prompt is unusable.
        """
        encoded = [encode(prompt, self.tokenizer) for prompt in as_list(prompts)]
        return self._run(encoded, sampling_params, draft, use_tqdm, on_step)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        draft: Draft | Same = SAME,
        use_tqdm: bool = True,
        on_step: OnStep | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages with ``role`` and ``content``) or several (a list of lists)."""
        if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
            raise InvalidValueError("messages", messages, "must be a list of messages with 'role' and 'content'")
        messages = list(messages)
        several = bool(messages) and not isinstance(messages[0], Mapping)
        talks = messages if several else [messages]
        encoded = [EncodedPrompt(self.encode_chat(talk)) for talk in talks]
        return self._run(encoded, sampling_params, draft, use_tqdm, on_step)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, draft: Draft | Same = SAME
    ) -> Stream:
        """Complete one prompt and give its text as it comes: an iterator of ``StreamOutput``.

        Closing it (or leaving its ``with`` block, or dropping it) ends the request and frees its cache. Several
        streams may be read in turns; all of them advance together.
        """
        return Stream(self, encode(prompt, self.tokenizer), sampling_params, draft)

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None, draft: Draft | Same = SAME
    ) -> Stream:
        """Answer one conversation as ``stream`` does."""
        return Stream(self, EncodedPrompt(self.encode_chat(messages)), sampling_params, draft)

    def resolve(self, draft: Draft | Same = SAME) -> DraftConfig | AutoDraft | None:
        """The draft of a call that names ``draft``, in full: a SPIRe draft says itself what it reads.

        Raises ``InvalidValueError`` for what does not exist.
        """
        if draft is SAME:
            return self.draft
        found = exact_only(settled(resolve_draft(draft), self._own), self.model.spec)
        if isinstance(found, AutoDraft) and found.beside:
            self.engine.check(settled(found.beside, self._own))
        return found

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of one prompt in any of its forms."""
        return encode(prompt, self.tokenizer).ids

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of one conversation, ready to be answered."""
        return encode_chat(require(self.tokenizer), self.checkpoint.chat_template, messages)

    def submit(
        self,
        prompt: EncodedPrompt,
        params: SamplingParams | None = None,
        sink: Sink | None = None,
        draft: Draft | Same = SAME,
    ) -> Request:
        """Queue a request, whose outputs ``sink`` is told of as ``step`` brings them."""
        params = self.default_sampling_params if params is None else params
        chosen = self.resolve(draft)
        ids = self.engine.add_all(prompt.ids, params, chosen)
        sequences = [self.engine.sequence(i) for i in ids]
        request = Request(prompt, sequences, self.tokenizer, label(self.model, tier(self.model, chosen)), sink)
        self._requests |= dict.fromkeys(ids, request)
        return request

    def step(self) -> list[StepOutput]:
        """One step of the engine; every request is told of what it got."""
        outputs = self.engine.step()
        self._deliver(outputs)
        return outputs

    def abort(self, request: Request) -> None:
        """End a request now, free its cache, and tell it so; one that has ended is fine."""
        running = [seq for seq in request.sequences if seq.status is not Status.FINISHED]
        self._deliver([self.engine.abort(seq.id) for seq in running])
        for seq in request.sequences:  # also those that were ended behind our back
            self._requests.pop(seq.id, None)

    def _deliver(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            request = self._requests.get(output.seq.id)
            if request:
                request.take(output)
            if output.finish_reason:
                self._requests.pop(output.seq.id, None)

    def _run(
        self,
        prompts: list[EncodedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        draft: Draft | Same,
        use_tqdm: bool,
        on_step: OnStep | None,
    ) -> list[RequestOutput]:
        params = one_each(sampling_params, len(prompts), self.default_sampling_params)
        requests: list[Request] = []
        # Only a terminal is shown a bar (disable=None), and not a second one.
        with tqdm(total=len(prompts), unit="request", disable=None if use_tqdm and not on_step else True) as bar:
            try:
                for prompt, p in zip(prompts, params, strict=True):
                    requests.append(self._submit_one_of(prompt, p, draft, len(requests), len(prompts)))
                while waiting := [request for request in requests if not request.done]:
                    outputs = self.step()
                    if on_step:
                        on_step(self.engine, outputs)
                    bar.update(sum(request.done for request in waiting))
            finally:  # an error or Ctrl-C: nothing of this call stays behind
                for request in requests:
                    self.abort(request)
        return [request.result() for request in requests]

    def _submit_one_of(
        self, prompt: EncodedPrompt, params: SamplingParams, draft: Draft | Same, index: int, count: int
    ) -> Request:
        try:
            return self.submit(prompt, params, None, draft)
        except InvalidValueError as error:
            if count == 1:
                raise
            # Among many, say which one.
            raise type(error)(
                f"{error.what} (prompt {index + 1} of {count})", error.value, error.limit, error.fix
            ) from error

    def _defaults(self, source: str) -> SamplingParams:
        if source not in ("auto", "none"):
            raise InvalidValueError("generation_config", source, "must be 'auto' or 'none'")
        try:
            return from_generation_config(self.checkpoint.generation_defaults if source == "auto" else {})
        except InvalidValueError as error:
            fix = "Pass generation_config='none' to go without it."
            raise ModelFileError(self.checkpoint.path, f"its generation_config.json: {error}", fix=fix) from error

    def _log_surprises(self, dtype: object) -> None:
        """What a user may not expect of this model on this machine."""
        for warning in self.checkpoint.warnings:
            log.warning(warning)
        on_torch = self.model.device.type == "cpu" and self.model.dtype != torch.float64 and not self.model.fused
        if on_torch:
            why = dict(explain("linear", self.model.spec)).get("native")
            log.warning("Running on PyTorch's kernels, several times slower than the native ones (%s).", why)
        if not self.model.lossless:
            log.warning("kv_format=%r is lossy: outputs are those of a slightly different model.", self.kv_format)
        if dtype == "float16":
            log.warning("float16 weights are stored as bfloat16: same size, wider range, fewer digits.")
        config = self.engine.config
        if config.max_tokens_per_request < config.max_model_len:
            log.warning(
                "The KV cache holds %d tokens, less than the model's context of %d: longer requests end there. "
                "Raise kv_cache_memory_bytes, or say max_model_len to be sure of a length.",
                config.max_tokens_per_request,
                config.max_model_len,
            )
