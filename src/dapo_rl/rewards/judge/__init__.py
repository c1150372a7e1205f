"""A judge: a language model that marks responses, behind an OpenAI-compatible endpoint or the policy itself."""
