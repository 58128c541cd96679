"""What can be launched: seams, arms, references, the dispatch table and the runtime ops."""
