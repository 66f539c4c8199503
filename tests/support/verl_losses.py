"""A user's own losses for verl: VERL_USE_EXTERNAL_MODULES=tests.support.verl_losses."""

from trustbatch.integrations.verl import register_objective
from trustbatch.objectives import build_objective

register_objective("p3o_k3", build_objective("p3o", kl="k3"))
