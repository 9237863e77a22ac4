"""Agent programs: an endpoint like OpenAI's answers their calls, which become the turns of a sample."""
