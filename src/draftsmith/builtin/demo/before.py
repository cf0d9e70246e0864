"""Keep track of what is on the shelves of a small shop."""

import csv
from dataclasses import dataclass


@dataclass
class Item:
    """One kind of thing the shop sells."""

    name: str
    price: float
    amount: int = 0
    shelf: str = "A1"

    def value(self):
        return self.price * self.amount

    def is_low(self, limit=5):
        return self.amount < limit


class Inventory:
    """All items of the shop, found by name."""

    def __init__(self, owner):
        self.owner = owner
        self.items = {}

    def add_item(self, item):
        if item.name in self.items:
            raise ValueError(f"{item.name} is already here")
        self.items[item.name] = item

    def remove_item(self, name):
        if name not in self.items:
            raise KeyError(name)
        return self.items.pop(name)

    def receive(self, name, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.items[name].amount += amount

    def sell(self, name, amount):
        item = self.items[name]
        if item.amount < amount:
            raise ValueError(f"only {item.amount} of {name} left")
        item.amount -= amount
        return item.price * amount

    def calc_total(self):
        total = 0
        for item in self.items.values():
            total += item.value()
        return total

    def low_items(self, limit=5):
        found = []
        for item in self.items.values():
            if item.is_low(limit):
                found.append(item)
        return sorted(found, key=lambda item: item.amount)

    def on_shelf(self, shelf):
        return [item for item in self.items.values() if item.shelf == shelf]


def load(path, owner):
    """Read an inventory from a CSV file."""
    inventory = Inventory(owner)
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            item = Item(
                name=row["name"],
                price=float(row["price"]),
                amount=int(row["amount"]),
                shelf=row["shelf"],
            )
            inventory.add_item(item)
    return inventory


def save(inventory, path):
    """Write an inventory to a CSV file."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "price", "amount", "shelf"])
        for item in inventory.items.values():
            writer.writerow([item.name, item.price, item.amount, item.shelf])


def report(inventory):
    lines = [f"Inventory of {inventory.owner}"]
    for name, item in sorted(inventory.items.items()):
        lines.append(f"{name:20} {item.amount:5} {item.price:8.2f}")
    lines.append(f"total {inventory.calc_total():.2f}")
    return "\n".join(lines)


def main():
    inventory = load("shop.csv", "Ada")
    print(report(inventory))
    for item in inventory.low_items():
        print(f"order more of {item.name}, only {item.amount} left")
    print(f"worth {inventory.calc_total():.2f} in all")


if __name__ == "__main__":
    main()
