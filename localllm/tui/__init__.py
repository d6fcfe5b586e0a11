"""The app in a terminal."""

import os

# How often a second the screen may be drawn: what a key has changed waits for the next time, and where drawing
# took longer than that for the one after it. Textual reads this when it is imported; 60 stands there.
os.environ.setdefault("TEXTUAL_FPS", "240")
