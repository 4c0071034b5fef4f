"""The offline API: prompts in, results out; loops ``Engine.step``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from os import PathLike
from typing import Any

import torch

from longdraft.checkpoint.chat import encode_chat
from longdraft.checkpoint.load import fitting, load_checkpoint
from longdraft.checkpoint.tokenizer_folder import read_tokenizer
from longdraft.config import DraftConfig
from longdraft.core import Sequence as EngineSequence
from longdraft.core import Status, StepOutput
from longdraft.drafts.registry import check
from longdraft.engine.engine import Engine
from longdraft.engine.sizing import resolve_device, resolve_dtype, size_engine
from longdraft.errors import InvalidValueError
from longdraft.exactness import tier
from longdraft.models.transformer import Transformer
from longdraft.outputs import CompletionOutput, Logprob, RequestOutput, RequestStats
from longdraft.prompts import EncodedPrompt, Prompt, as_list, encode, one_each, require
from longdraft.sampling_params import SamplingParams

Message = Mapping[str, Any]
Draft = DraftConfig | str | Mapping[str, Any] | None
OnStep = Callable[[Engine, list[StepOutput]], None]
log = logging.getLogger("longdraft")


class LLM:
    """A model ready to generate. One thread may use it at a time.

    Args:
        model: folder, GGUF file, hub id, or ``None`` for the embedded SmolLM2-135M-Instruct.
        draft: what proposes tokens: a ``DraftConfig``, a selection's name (``"streaming_llm"``), a mapping of
            ``DraftConfig``'s fields, or ``None`` for plain decoding. It never changes what a request returns.
        dtype: type weights are stored and multiplied in: auto, float32, bfloat16, float64 (float16 becomes bfloat16).
        kv_dtype: type K and V are stored in; ``None`` is ``dtype``.
        device: auto, cpu or cuda.
        max_model_len: longest prompt + output in tokens; ``None`` is the model's own limit.
        max_num_seqs: most requests in flight at once; the rest wait.
        max_num_batched_tokens: prompt tokens per prefill step.
        kv_cache_memory_bytes: size of the KV cache; ``None`` is 40 % of the memory that the weights leave free.
        block_size: tokens per KV page.
        seed: what the seeds of unseeded requests are drawn from.
        tokenizer: folder with another ``tokenizer.json``; ``None`` is the model's own.
        download: allow the network for a hub id that is not cached.
        on_load: called as ``on_load(layers_done, layers)`` while weights are read.

    Raises ``ModelNotFoundError``, ``ModelFileError``, ``UnsupportedModelError``, ``InvalidValueError`` or
    ``KVCapacityError``.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        draft: Draft = None,
        *,
        dtype: str | torch.dtype = "auto",
        kv_dtype: str | torch.dtype | None = None,
        device: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 256,
        max_num_batched_tokens: int = 512,
        kv_cache_memory_bytes: int | None = None,
        block_size: int = 16,
        seed: int = 0,
        tokenizer: str | PathLike[str] | None = None,
        download: bool = False,
        on_load: Callable[[int, int], None] | None = None,
    ) -> None:
        self.draft = resolve_draft(draft)
        self.checkpoint = load_checkpoint(model, download=download)
        self.tokenizer = self.checkpoint.tokenizer
        if tokenizer is not None:
            self.tokenizer = fitting(read_tokenizer(tokenizer), self.checkpoint.config, tokenizer)
        target_device = resolve_device(device)
        storage = resolve_dtype("dtype", dtype)
        kv_storage = storage if kv_dtype is None else resolve_dtype("kv_dtype", kv_dtype)
        engine_config = size_engine(
            self.checkpoint.config,
            storage,
            kv_storage,
            target_device,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            kv_cache_memory_bytes=kv_cache_memory_bytes,
            block_size=block_size,
            seed=seed,
        )
        self.model = Transformer(
            self.checkpoint.config,
            self.checkpoint.weights,
            dtype=storage,
            kv_dtype=kv_storage,
            device=target_device,
            page_size=block_size,
            progress=on_load,
        )
        self.engine = Engine(self.model, engine_config, self.checkpoint.eos_token_ids, self.tokenizer)
        self._log_surprises(dtype)

    def __repr__(self) -> str:
        config = self.engine.config
        return (
            f"LLM({self.checkpoint.name!r}, dtype={self.model.dtype}, device={str(self.model.device)!r}, "
            f"max_model_len={config.max_model_len}, kv_tokens={config.num_pages * config.block_size})"
        )

    @property
    def exactness(self) -> str:
        """The tier of the promise that a draft changes nothing, on these kernels: see docs/lossless.md."""
        return tier(self.model, self.draft)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_step: OnStep | None = None,
    ) -> list[RequestOutput]:
        """Complete each prompt; results come in the order of the prompts.

        A prompt is text, token ids, or a mapping with ``prompt`` or ``prompt_token_ids``. ``sampling_params`` is one
        for all or one per prompt. ``on_step(engine, outputs)`` is called after every step; it may abort requests.

        Raises ``InvalidValueError`` or ``ContextLengthError`` before anything is computed if any prompt is unusable.
        """
        return self._run([encode(prompt, self.tokenizer) for prompt in as_list(prompts)], sampling_params, on_step)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_step: OnStep | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation (a list of messages with ``role`` and ``content``) or several (a list of lists)."""
        if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Iterable):
            raise InvalidValueError("messages", messages, "must be a list of messages with 'role' and 'content'")
        messages = list(messages)
        several = bool(messages) and not isinstance(messages[0], Mapping)
        talks = messages if several else [messages]
        encoded = [EncodedPrompt(self.encode_chat(talk)) for talk in talks]
        return self._run(encoded, sampling_params, on_step)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of one prompt in any of its forms."""
        return encode(prompt, self.tokenizer).ids

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of one conversation, ready to be answered."""
        return encode_chat(require(self.tokenizer), self.checkpoint.chat_template, messages)

    def _run(
        self,
        prompts: list[EncodedPrompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        on_step: OnStep | None,
    ) -> list[RequestOutput]:
        params = one_each(sampling_params, len(prompts))
        sequences: list[EngineSequence] = []
        try:
            for prompt, p in zip(prompts, params, strict=True):
                sequences.append(self._add(prompt, p, len(sequences), len(prompts)))
            while any(seq.status is not Status.FINISHED for seq in sequences):
                outputs = self.engine.step()
                if on_step:
                    on_step(self.engine, outputs)
        finally:  # an error or Ctrl-C: nothing of this call stays behind
            for seq in sequences:
                if seq.status is not Status.FINISHED:
                    self.engine.abort(seq.id)
        return [self._result(prompt, seq) for prompt, seq in zip(prompts, sequences, strict=True)]

    def _add(self, prompt: EncodedPrompt, params: SamplingParams, index: int, count: int) -> EngineSequence:
        try:
            return self.engine.sequence(self.engine.add(prompt.ids, params, self.draft))
        except InvalidValueError as error:
            if count == 1:
                raise
            # Among many, say which one.
            raise type(error)(
                f"{error.what} (prompt {index + 1} of {count})", error.value, error.limit, error.fix
            ) from error

    def _result(self, prompt: EncodedPrompt, seq: EngineSequence) -> RequestOutput:
        output_ids, text = seq.output_ids, self.output_text(seq)
        stats = RequestStats(
            prompt_tokens=seq.num_prompt,
            output_tokens=len(output_ids),
            prefill_s=seq.stats.prefill_s,
            decode_s=seq.stats.decode_s,
            preemptions=seq.stats.preemptions,
            decode_tokens=seq.stats.decode_tokens,
            draft_s=seq.stats.draft_s,
            verify_passes=seq.stats.verify_passes,
            drafted_by_position=tuple(seq.stats.drafted),
            accepted_by_position=tuple(seq.stats.accepted),
        )
        logprobs = None if seq.params.logprobs is None else [self._decoded(entry) for entry in seq.logprobs]
        completion = CompletionOutput(0, text, output_ids, str(seq.finish_reason), seq.error, logprobs)
        return RequestOutput(prompt.text, seq.ids[: seq.num_prompt], [completion], stats, self.exactness)

    def output_text(self, seq: EngineSequence) -> str:
        """The text of a sequence's output, up to a stop string if one ended it; empty without a tokenizer."""
        if seq.stop_text is not None:
            return seq.stop_text
        return self.tokenizer.decode(seq.output_ids) if self.tokenizer else ""

    def _decoded(self, entry: dict[int, Logprob]) -> dict[int, Logprob]:
        if self.tokenizer is None:
            return entry
        decode = self.tokenizer.decode
        return {i: replace(x, decoded_token=decode([i], skip_special_tokens=False)) for i, x in entry.items()}

    def _log_surprises(self, dtype: object) -> None:
        """What a user may not expect of this model on this machine."""
        for warning in self.checkpoint.warnings:
            log.warning(warning)
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


def resolve_draft(draft: Draft) -> DraftConfig | None:
    """The config that ``LLM(draft=...)`` stands for; ``InvalidValueError`` for names and fields that do not exist."""
    if draft is None or isinstance(draft, DraftConfig):
        return None if draft is None else check(draft)
    if isinstance(draft, str):
        return check(DraftConfig(kv=draft))
    if not isinstance(draft, Mapping):
        raise InvalidValueError("draft", draft, "must be a DraftConfig, a selection's name, a mapping, or None")
    try:
        return check(DraftConfig(**draft))
    except TypeError as error:
        names = ", ".join(DraftConfig.__dataclass_fields__)
        raise InvalidValueError("draft", dict(draft), f"may have the fields {names}") from error
