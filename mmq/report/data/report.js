// Sorts tables by a click, Enter or Space on a column's head; nothing else depends on it.
document.querySelectorAll("table.sortable").forEach(function (table) {
  var body = table.tBodies[0];
  Array.prototype.forEach.call(table.tHead.rows[0].cells, function (head, index) {
    var button = document.createElement("button");
    button.type = "button";
    while (head.firstChild) button.appendChild(head.firstChild);
    head.appendChild(button);
    button.addEventListener("click", function () {
      var down = head.getAttribute("aria-sort") === "ascending";
      Array.prototype.forEach.call(table.tHead.rows[0].cells, function (other) {
        other.removeAttribute("aria-sort");
      });
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      var rows = Array.prototype.map.call(body.rows, function (row) {
        var cell = row.cells[index], order = cell.getAttribute("data-o");
        var text = cell.textContent.trim();
        var value = order === null ? (head.classList.contains("n") ? Number(text || NaN) : NaN)
                                   : Number(order);
        return { row: row, value: value, text: text };
      });
      rows.sort(function (a, b) {
        var numbers = !isNaN(a.value) - !isNaN(b.value);
        if (numbers) return -numbers;
        var order = isNaN(a.value) ? a.text.localeCompare(b.text, "en", { numeric: true })
                                   : a.value - b.value;
        return down ? -order : order;
      });
      rows.forEach(function (entry) { body.appendChild(entry.row); });
    });
  });
});
