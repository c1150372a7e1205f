"""Every setting: one spelling, one type, one default, in one place.

A recipe is a YAML file with these sections. A key is `section.name` everywhere: in the file, on the command line, in
the run directory and in error messages. Settings are frozen; values derived from several of them are properties.
"""

from dapo_rl.config.presets import PRESETS as PRESETS
from dapo_rl.config.root import Config as Config
from dapo_rl.config.root import known_keys as known_keys
from dapo_rl.config.section import Section as Section
from dapo_rl.config.sections import AlgoSettings as AlgoSettings
from dapo_rl.config.sections import ClusterSettings as ClusterSettings
from dapo_rl.config.sections import CriticSettings as CriticSettings
from dapo_rl.config.sections import DataSettings as DataSettings
from dapo_rl.config.sections import EnvSettings as EnvSettings
from dapo_rl.config.sections import LogSettings as LogSettings
from dapo_rl.config.sections import LoraSettings as LoraSettings
from dapo_rl.config.sections import ModelSettings as ModelSettings
from dapo_rl.config.sections import RewardSettings as RewardSettings
from dapo_rl.config.sections import SamplingSettings as SamplingSettings
from dapo_rl.config.sections import TeacherSettings as TeacherSettings
from dapo_rl.config.sections import TrainSettings as TrainSettings
from dapo_rl.config.sections import WeightedVerifier as WeightedVerifier
from dapo_rl.config.sections import Window as Window
from dapo_rl.config.sources import Sources as Sources
from dapo_rl.config.sources import SourceSettings as SourceSettings
from dapo_rl.config.sources import entries_of as entries_of
from dapo_rl.config.sources import labels_of as labels_of
from dapo_rl.config.sources import source_name as source_name
from dapo_rl.config.sources import weights_of as weights_of
