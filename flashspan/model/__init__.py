"""LLaMA 2 and 3. The model receives its attention as a function, and imports nothing about devices."""

from .config import PRESETS, LlamaConfig, RopeScaling, preset
from .hub import find_model, is_hub_name
from .huggingface import check_weights, load_llama, read_weights, save_llama, save_state
from .huggingface_config import read_config
from .llama import Llama, initial_weight
from .loss import IGNORE, linear_cross_entropy

__all__ = [
    "IGNORE",
    "PRESETS",
    "Llama",
    "LlamaConfig",
    "RopeScaling",
    "check_weights",
    "find_model",
    "initial_weight",
    "is_hub_name",
    "linear_cross_entropy",
    "load_llama",
    "preset",
    "read_config",
    "read_weights",
    "save_llama",
    "save_state",
]
