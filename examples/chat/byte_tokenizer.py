"""A tokenizer over bytes: no files, no vocabulary to learn, no text that it cannot take."""

import torch

BYTES = 256
BEGIN, USER, ASSISTANT, END = range(BYTES, BYTES + 4)
VOCABULARY = BYTES + 4


class ByteTokenizer:
    """What a chat needs of a transformers tokenizer: a template, and ids back to text."""

    pad_token_id = END

    def apply_chat_template(self, messages, **_):
        """{"input_ids": int64 [1, n]} of [{"role", "content"}, ...], open for the assistant's answer."""
        ids = [BEGIN]
        for message in messages:
            role = {"user": USER, "assistant": ASSISTANT}[message["role"]]
            ids += [role, *message["content"].encode(errors="surrogateescape"), END]
        return {"input_ids": torch.tensor([[*ids, ASSISTANT]])}

    def decode(self, ids, **_):
        """The marks are left out; bytes that are no UTF-8 become lone surrogates, from which they come back."""
        ids = [ids] if isinstance(ids, int) else ids
        return bytes(token for token in map(int, ids) if token < BYTES).decode(errors="surrogateescape")
