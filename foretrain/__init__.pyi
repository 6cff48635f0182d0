# The public names, once: type checkers and editors read them here, and __init__.py finds them here at run time.

from foretrain.advice.record import Advices as Advices
from foretrain.analysis.forecast_check import ForecastCheck as ForecastCheck
from foretrain.analysis.forecast_check import check_forecast as check_forecast
from foretrain.analysis.run import RunExplanation as RunExplanation
from foretrain.analysis.snapshot_analysis import SnapshotAnalysis as SnapshotAnalysis
from foretrain.app.advise import advise as advise
from foretrain.app.compare import compare as compare
from foretrain.app.explain import LogExplanation as LogExplanation
from foretrain.app.explain import explain as explain
from foretrain.app.plan import plan as plan
from foretrain.app.train import train as train
from foretrain.base.errors import ConfigError as ConfigError
from foretrain.base.errors import UserError as UserError
from foretrain.comparison.compare import Comparison as Comparison
from foretrain.config.options import RunConfig as RunConfig
from foretrain.config.resolve import from_values as from_values
from foretrain.config.resolve import resolve as resolve
from foretrain.hardware.catalogue import Gpu as Gpu
from foretrain.hardware.catalogue import find_gpu as find_gpu
from foretrain.predict.plan import Plan as Plan
from foretrain.predict.trace.elsewhere import trace as trace
from foretrain.predict.trace.traced import Traced as Traced
from foretrain.reports.making import report as report
from foretrain.training.store import RunRecord as RunRecord
