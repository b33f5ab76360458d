"""Arrays, for eyes: picture.py draws them in text."""
