import typer

app = typer.Typer()


@app.command("x")
def x() -> None:
    pass


@app.command("y")
def y() -> None:
    pass
