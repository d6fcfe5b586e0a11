"""Fixtures of tests/server: servers of real models."""

from tests.server.conftest import demo, demo_url, stories, stories_url

__all__ = ["demo", "demo_url", "stories", "stories_url"]
