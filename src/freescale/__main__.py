from freescale.cli import main

main()
