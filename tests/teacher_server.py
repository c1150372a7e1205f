"""A real HTTP server around a model that answers as vLLM's does: /v1/models, /tokenize and /v1/completions with
prompt_logprobs."""

import json

import torch
from local_server import LocalServer

CONTEXT = 512


class TeacherServer(LocalServer):
    """`before` gets the path and the body, and returns None, or (status, bytes) in place of the answer."""

    def __init__(self, model, tokenizer, before=lambda path, body: None):
        self.model, self.tokenizer, self.before = model, tokenizer, before
        self.asked, self.headers = [], []
        super().__init__()

    def respond(self, path, body, headers):
        with self.lock:
            self.asked.append((path, body))
            self.headers.append(headers)
            status, data = self.before(path, body) or (200, None)
            return status, {}, json.dumps(self.answer(path, body)).encode() if data is None else data

    @property
    def completions(self):
        """The bodies of requests for completions."""
        return [body for path, body in self.asked if path == "/v1/completions"]

    def answer(self, path, body):
        if path == "/v1/models":
            return {"object": "list", "data": [{"id": "teacher", "max_model_len": CONTEXT}, {"id": "lora"}]}
        if path == "/tokenize":
            ids = self.tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"]).input_ids
            return {"count": len(ids), "max_model_len": CONTEXT, "tokens": ids}
        choices = [self._choice(i, row, body["prompt_logprobs"]) for i, row in enumerate(body["prompt"])]
        return {"object": "text_completion", "model": body["model"], "choices": choices[::-1]}

    @torch.no_grad()
    def _choice(self, index, row, top):
        logps = self.model(torch.tensor([row])).logits[0].float().log_softmax(-1)
        positions = [None]
        for token, of_next in zip(row[1:], logps, strict=False):
            best = of_next.topk(top).indices.tolist() if top else []
            positions.append(
                {
                    str(each): {"logprob": of_next[each].item(), "rank": 1, "decoded_token": "?"}
                    for each in {token, *best}
                }
            )
        return {"index": index, "text": "?", "finish_reason": "length", "prompt_logprobs": positions}


def teacher_server(model, tokenizer, before=lambda path, body: None):
    return TeacherServer(model, tokenizer, before).running()
