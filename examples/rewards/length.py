"""A reward of one's own: a right answer is worth 1, and every character costs a hundredth.

`function: examples.rewards.length:reward` in a manifest names it. As a program, it serves the reward by itself.
"""


def reward(completion: str, problem: dict) -> float:
    right = f"<answer>{problem['answer']}</answer>" in completion
    return right - len(completion) / 100


if __name__ == "__main__":
    from rljob.rewards.sdk import serve

    serve(reward)
