// DataTables takes its dark colours from a class.
const dark = matchMedia("(prefers-color-scheme: dark)");
const follow = () => document.documentElement.classList.toggle("dark", dark.matches);
dark.addEventListener("change", follow);
follow();
// Tables start in the order of the file, and are made when they are first shown: some have hundreds of rows.
const filters = [{ target: 0, content: [["search", "searchList"]] }];
const numberFilters = [{ target: 0, content: [["search"]] }];
const options = {
  order: [],
  autoWidth: false,
  pageLength: 25,
  lengthMenu: [10, 25, 100, { label: "all", value: -1 }],
  columnDefs: [
    { targets: "number", type: "num", columnControl: numberFilters },
    { targets: "words", columnControl: filters },
  ],
};
const bare = { paging: false, layout: { topStart: null, topEnd: null, bottomStart: null, bottomEnd: null } };
for (const details of document.querySelectorAll("details.table")) {
  const make = () => {
    const table = details.querySelector("table.data");
    if (!details.open || DataTable.isDataTable(table)) return;
    const isSmall = table.tBodies[0].rows.length <= 10;
    new DataTable(table, isSmall ? { ...options, ...bare } : options);
  };
  details.addEventListener("toggle", make);
  make();
}
document.body.dataset.tables = "made"; // for who waits for it
