"""The app in a terminal."""

import os

# How often a second the screen may be drawn: what a key has changed waits for the next time. Textual reads this
# when it is imported; as it stands there, 60, half of the keys would wait longer than the app needs to draw them.
os.environ.setdefault("TEXTUAL_FPS", "120")
