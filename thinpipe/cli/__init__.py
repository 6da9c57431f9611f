"""One thin file per verb: options -> call -> Record -> what people see and keep."""
