"""A reward of one's own: a right answer is worth 1, and every character costs a hundredth."""

from rljob.rewards.sdk import serve


def reward(completion: str, problem: dict) -> float:
    right = f"<answer>{problem['answer']}</answer>" in completion
    return right - len(completion) / 100


serve(reward)
