"""Every setting: one spelling, one type, one default, in one place.

A recipe is a YAML file with these sections. A key is `section.name` everywhere: in the file, on the command line, in
the run directory and in error messages. Settings are frozen; values derived from several of them are properties.
"""

from dapo_rl.config.presets import PRESETS
from dapo_rl.config.root import Config, known_keys
from dapo_rl.config.section import Section
from dapo_rl.config.sections import (
    AlgoSettings,
    ClusterSettings,
    CriticSettings,
    DataSettings,
    EnvSettings,
    LogSettings,
    LoraSettings,
    ModelSettings,
    RewardSettings,
    SamplingSettings,
    TeacherSettings,
    TrainSettings,
    WeightedVerifier,
    Window,
)
from dapo_rl.config.sources import Sources, SourceSettings, entries_of, labels_of, source_name, weights_of

__all__ = [
    "PRESETS",
    "AlgoSettings",
    "ClusterSettings",
    "Config",
    "CriticSettings",
    "DataSettings",
    "EnvSettings",
    "LogSettings",
    "LoraSettings",
    "ModelSettings",
    "RewardSettings",
    "SamplingSettings",
    "Section",
    "SourceSettings",
    "Sources",
    "TeacherSettings",
    "TrainSettings",
    "WeightedVerifier",
    "Window",
    "entries_of",
    "known_keys",
    "labels_of",
    "source_name",
    "weights_of",
]
