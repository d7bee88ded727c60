"""Paired GRPO experiments that settle what an optimizer setting saves and whether training stays the same."""
