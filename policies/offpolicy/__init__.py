"""What another policy would have earned, estimated from logged steps.

    logged_steps ──► follower, overlap, step_model, bootstrap ──► switch_sums ──► estimators

Imports the plan of ``interface`` and constants of ``models``; no rule and no policy.
"""
