"""An example of a user's reward: 1 for a right answer, minus 0.01 for each character.

A manifest names it with `function: examples.rewards.length:reward`. Run as a program, this file serves the reward.
"""


def reward(completion: str, problem: dict) -> float:
    right = f"<answer>{problem['answer']}</answer>" in completion
    return right - len(completion) / 100


if __name__ == "__main__":
    from rljob.rewards.sdk import serve

    serve(reward)
