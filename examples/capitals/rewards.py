def brief(prompts, completions, answer, **columns):
    """1 if the reply names the answer in at most eight words, otherwise 0."""
    return [float(truth in reply and len(reply.split()) <= 8) for reply, truth in zip(completions, answer)]
