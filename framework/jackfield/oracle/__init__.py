"""The oracle: chooses one plugin for each need, and can always say why."""

from jackfield.oracle.codes import REASON_CODES, STAGES
from jackfield.oracle.counterfactual import Counterfactual, counterfactuals
from jackfield.oracle.decide import decide, guard_fallback, mark_states
from jackfield.oracle.judge import probe_reasons
from jackfield.oracle.report import DecisionReport, ProposalOutcome, diff, log_decisions
from jackfield.oracle.verdict import Decision, Verdict, request_data

__all__ = [
    "REASON_CODES",
    "STAGES",
    "Counterfactual",
    "Decision",
    "DecisionReport",
    "ProposalOutcome",
    "Verdict",
    "counterfactuals",
    "decide",
    "diff",
    "guard_fallback",
    "log_decisions",
    "mark_states",
    "probe_reasons",
    "request_data",
]
