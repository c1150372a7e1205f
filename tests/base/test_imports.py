"""Imports without garbage collections."""

import gc

import pytest

from dapo_rl.base.imports import quick_imports


@pytest.fixture
def collecting():
    enabled, frozen = gc.isenabled(), gc.get_freeze_count()
    gc.enable()
    yield
    if not frozen:
        gc.unfreeze()
    if not enabled:
        gc.disable()


def test_nothing_is_collected_meanwhile_and_what_was_imported_is_left_out_later(collecting):
    before = gc.get_freeze_count()
    with quick_imports():
        assert not gc.isenabled()
        kept = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(kept)


def test_an_error_is_passed_on_with_collections_on_again(collecting):
    with pytest.raises(ImportError), quick_imports():
        raise ImportError
    assert gc.isenabled()


def test_collections_that_are_off_stay_off(collecting):
    gc.disable()
    with quick_imports():
        pass
    assert not gc.isenabled()
