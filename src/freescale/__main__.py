from freescale.cli.main import main

main()
