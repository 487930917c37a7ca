from kvferry.client.cli import main

main()
