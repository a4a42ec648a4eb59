"""Forecasters of demand. `table.FORECASTERS` names them."""
