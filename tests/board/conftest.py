"""No watcher outlives its test: it would see the changes of the next one too, through the patches of that one. And no
browser outlives the browser tests: Playwright's event loop would run on in this thread."""

import pytest
from one_browser import end_browser

from dapo_rl.board.watcher import Watcher


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item, nextitem):
    result = yield
    if nextitem is None or not nextitem.path.name.startswith("test_browser"):
        end_browser()
    return result


@pytest.fixture(autouse=True)
def closed_watchers(monkeypatch):
    watchers, make = [], Watcher.__init__

    def made(self, *arguments):
        make(self, *arguments)
        watchers.append(self)

    monkeypatch.setattr(Watcher, "__init__", made)
    yield
    for watcher in watchers:
        watcher.close()
        if watcher._thread:
            watcher._thread.join(60)
            assert not watcher._thread.is_alive()
