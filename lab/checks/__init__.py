"""The judge: it finds out whether an implementation of FlashInfer's attention functions gives right results."""

from lab.extras import require

require("The judge", "numpy", "pebble", "rich")

from lab.calls.problem import AttentionCall
from lab.checks.parameters.models import Configuration
from lab.checks.properties.check import Level
from lab.checks.report import Report
from lab.checks.run.invariance import invariance
from lab.checks.run.judge import judge, judge_recorded
from lab.checks.run.judging import judge_case, judge_forward
from lab.checks.run.verdicts import CaseVerdict, Outcome
from lab.metadata.engine.forward_mode import ForwardMode
from lab.metadata.engine.graph_inputs import GraphMode, MetadataPlace
from lab.metadata.engine.kv_cache import KVLayout
from lab.metadata.engine.lengths import DraftAttention
from lab.metadata.mha.vllm import Engine
from lab.ranges import Ranges
from lab.recorded.case import RecordedCase
from lab.workloads.attention_case import AttentionCase, Contents, Dead, Entries, HeadPages, Storage, TableTail
from lab.workloads.forward_case import ForwardCase
from lab.workloads.graph_case import GraphCase, MLAGraphCase, ReplaySequence
from lab.workloads.inputs.draft_lists import DraftListsCase
from lab.workloads.inputs.ragged import RaggedCase
from lab.workloads.interfaces import MetadataFunction
from lab.workloads.mla_case import MLACase

# What judges, and what the reproduction of a case is made of.
__all__ = [
    "AttentionCall",
    "AttentionCase",
    "CaseVerdict",
    "Configuration",
    "Contents",
    "Dead",
    "DraftAttention",
    "DraftListsCase",
    "Engine",
    "Entries",
    "ForwardCase",
    "ForwardMode",
    "GraphCase",
    "GraphMode",
    "HeadPages",
    "KVLayout",
    "Level",
    "MLACase",
    "MLAGraphCase",
    "MetadataFunction",
    "MetadataPlace",
    "Outcome",
    "RaggedCase",
    "Ranges",
    "RecordedCase",
    "ReplaySequence",
    "Report",
    "Storage",
    "TableTail",
    "invariance",
    "judge",
    "judge_case",
    "judge_forward",
    "judge_recorded",
]
