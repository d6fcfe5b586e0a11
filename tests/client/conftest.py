"""Servers of real models: those of tests/server."""

from tests.server.conftest import demo, demo_url, stories, stories_url

__all__ = ["demo", "demo_url", "stories", "stories_url"]
