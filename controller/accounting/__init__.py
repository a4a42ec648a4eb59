"""Accounting: joules and grams of the fleet, by what was measured, and the rates of receipts."""
