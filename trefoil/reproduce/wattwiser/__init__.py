"""WattWiser played again: modelled GPUs of Table I, SWIM's load, its figures."""
