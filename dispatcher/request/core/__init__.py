"""What a request says and costs, pure: wire format, tenants' limits, receipts, retry budget."""
