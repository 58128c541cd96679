"""What is remembered: the repository, its migrations, exports and the read side for serving."""
