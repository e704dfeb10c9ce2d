"""What a run costs: model shapes, measured hardware, and the formulas of the papers. The only place for formulas."""
