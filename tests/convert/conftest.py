"""A run of another library, converted."""

import pytest

from dapo_rl import Config
from dapo_rl.convert.read_run import read_run
from dapo_rl.convert.write_recipe import convert_run, recipe_text


@pytest.fixture
def converted(tmp_path):
    """The result, the settings of its recipe, and the rows by their keys."""

    def convert(text, name="run.sh", **options):
        (tmp_path / name).write_text(text)
        result = convert_run(read_run(tmp_path / name), **options)
        (tmp_path / "recipe.yaml").write_text(recipe_text(result))
        return result, Config.load(tmp_path / "recipe.yaml"), {row.key: row for row in result.rows}

    return convert
