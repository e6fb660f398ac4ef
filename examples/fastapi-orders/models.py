"""What the API accepts and answers."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

STRIPPED = ConfigDict(str_strip_whitespace=True)

Status = Literal["pending", "paid", "shipped", "cancelled"]
Customer = Annotated[str, Field(min_length=1, max_length=200)]
Note = Annotated[str, Field(min_length=1, max_length=1000)]


class Item(BaseModel):
    model_config = STRIPPED

    sku: Annotated[str, Field(min_length=1, max_length=64)]
    quantity: Annotated[int, Field(ge=1, le=10_000)]
    price_cents: Annotated[int, Field(ge=0, le=100_000_000)]


class NewOrder(BaseModel):
    model_config = STRIPPED

    customer: Customer
    items: Annotated[list[Item], Field(min_length=1, max_length=100)]

    @property
    def total_cents(self) -> int:
        return sum(item.quantity * item.price_cents for item in self.items)


class OrderChange(BaseModel):
    model_config = STRIPPED

    status: Status | None = None
    add_note: Note | None = None

    @model_validator(mode="after")
    def changes_something(self) -> "OrderChange":
        if self.status is None and self.add_note is None:
            raise ValueError("give 'status', 'add_note' or both")
        return self


class ImportedRow(Item):
    """One line of a CSV file: an order with one item."""

    model_config = ConfigDict(extra="forbid")

    customer: Customer

    def order(self) -> NewOrder:
        item = Item(sku=self.sku, quantity=self.quantity, price_cents=self.price_cents)
        return NewOrder(customer=self.customer, items=[item])


ImportedRows = TypeAdapter(Annotated[list[ImportedRow], Field(min_length=1, max_length=10_000)])


class Order(BaseModel):
    id: int
    customer: str
    items: list[Item]
    total_cents: int
    status: Status
    notes: list[str]
    created_at: str


class Charge(BaseModel):
    id: int
    order_id: int
    amount_cents: int
    created_at: str


class Imported(BaseModel):
    imported: int
    ids: list[int]


class Ledger(BaseModel):
    orders: int
    charges: int
    notes: int
